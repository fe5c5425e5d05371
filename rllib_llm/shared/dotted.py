"""Objects named by dotted path, and the modules of `--import`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_llm.shared.errors import Problems, did_you_mean, require

IMPORTABLE = "name a module that can be imported"
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)?")


def as_list(given: Any) -> list[Any]:
    """A setting's values as a list: of a list or tuple its entries, of None, "" and {} none, else
    the value alone."""
    if isinstance(given, (list, tuple)):
        return list(given)
    return [] if given is None or (isinstance(given, (str, Mapping)) and not given) else [given]


def named_entries(given: Any, name: str) -> list[tuple[str, Any]]:
    """The entries of `as_list`, each with its place: `name`, in a list `name[0]` and so on."""
    places = [f"{name}[{number}]" for number in range(len(given))
              ] if isinstance(given, (list, tuple)) else [name]  # fmt: skip
    return [*zip(places, as_list(given), strict=False)]


def named_model(given: Any) -> dict[str, Any]:
    """The settings of a model, `model` among them, of a mapping of these or of the model alone."""
    return dict(given) if isinstance(given, Mapping) else {"model": given}


def package_of(path: str) -> str:
    """The first package of a dotted path; "" for other texts."""
    is_path = _DOTTED.fullmatch(path) and re.search("[.:]", path)
    return re.split("[.:]", path, maxsplit=1)[0] if is_path else ""


def looks_dotted(path: str) -> bool:
    """True where `path` has the form of a dotted path and its first package can be imported.

    `org/name` and plain words never do, so hub ids and file names stay apart from dotted paths.
    """
    package = package_of(path)
    return bool(package) and importlib.util.find_spec(package) is not None


def import_dotted(path: str, *, name: str = "path") -> Any:
    """Returns the object that `path` names; `name` is the setting to blame in the message.

    With a colon the module ends there (`a.b:Class.method`); without one the longest importable
    prefix is the module.

    Raises:
        Problems: not a dotted path, no such module, one whose code raises (the cause is what
            it raised), or no such name in it.
    """
    rule = "be a dotted path such as 'package.module.name' or 'package.module:name'"
    require(isinstance(path, str) and package_of(path), name, path, rule, "", "")
    try:
        if ":" in path:
            module_path, attributes = path.split(":")
            module = _import_module(module_path)
            rest = attributes.split(".")
        else:
            module_path, module, rest = _longest_module(path.split("."))
    except (SystemExit, Exception) as error:
        raise _not_imported(error, name, path) from error
    if module is None:
        files = [file.stem for file in Path.cwd().glob("*.py")]
        remedy = f"Write {path.replace('.py:', ':')!r}" if ".py:" in path else did_you_mean(
            package_of(path), files, cutoff=0.8,
            otherwise="Install it, or put its folder on PYTHONPATH",
        )  # fmt: skip
        what = f"there is no module {module_path or package_of(path)!r}"
        raise Problems(name, IMPORTABLE, what, remedy, path)
    return _walk(module, module_path, rest, path, name)


def _not_imported(error: BaseException, name: str, path: str) -> Problems:
    """The error for a module whose code raises, or ends the process, as that of a script may."""
    frames = traceback.extract_tb(error.__traceback__)
    remedy = "Correct the module, or install what it needs"
    if isinstance(error, SystemExit):
        # A module's own text, not what it calls, such as argparse.
        line = next((frame for frame in reversed(frames) if frame.name == "<module>"), frames[-1])
        reason = (f"{os.path.basename(line.filename)} must not exit when it is imported, and line "
                  f"{line.lineno} does (SystemExit: {error})")  # fmt: skip
        remedy = "Put that under `if __name__ == '__main__':`"
    elif isinstance(error, SyntaxError):
        reason = f"its code raises SyntaxError ({error.filename}:{error.lineno}): {error.msg}"
    else:
        line = [each for each in frames if not each.filename.startswith("<frozen importlib")][-1]
        where = f"{line.filename}:{line.lineno}"
        reason = f"its code raises {type(error).__name__} ({where}): {error}"
    return Problems(name, IMPORTABLE, reason, remedy, path)


def _import_module(module_path: str) -> Any:
    """The module, or None if it does not exist; its own import errors propagate."""
    try:
        return importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_path == missing or module_path.startswith(missing + "."):
            return None
        raise


def _longest_module(parts: list[str]) -> tuple[str, Any, list[str]]:
    for end in range(len(parts) - 1, 0, -1):
        module_path = ".".join(parts[:end])
        module = _import_module(module_path)
        if module is not None:
            return module_path, module, parts[end:]
    return ".".join(parts[:-1]), None, []


def _walk(module: Any, module_path: str, rest: list[str], path: str, name: str) -> Any:
    found = module
    for attribute in rest:
        if not hasattr(found, attribute):
            names = [known for known in dir(found) if not known.startswith("_")]
            meant = did_you_mean(attribute, names, 3, otherwise="Check the spelling")
            if path == f"{module_path}.py":
                meant = f"Write {f'{module_path}.NAME'!r}, with the name of a function or class"
            rule, what = f"name something in {module_path!r}", f"it has no {attribute!r}"
            raise Problems(name, rule, what, meant, path)
        found = getattr(found, attribute)
    return found


IMPORTS = "RLLIB_LLM_IMPORT"  # their names, for processes that are started from here
HOOK = "rllib_llm.shared.dotted.import_named"


def name_imports(modules: Sequence[str]) -> None:
    """Imports the modules in this process, and in all processes that it starts later.

    Raises:
        ModuleNotFoundError: a module lacks another one.
        Problems: no module's name, no such module, or the code of one exits.
    """
    for module in modules:
        is_name, stem = all(part.isidentifier() for part in module.split(".")), Path(module).stem
        remedy = f"Write {stem}" if stem.isidentifier() else "Write package.module"
        require(is_name, "--import", module, "be a module's name", "", remedy)
        try:
            importlib.import_module(module)
        except SystemExit as error:
            raise _not_imported(error, "--import", module) from error
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            remedy = "Start the command in its folder, or put the folder on PYTHONPATH"
            raise Problems("--import", IMPORTABLE, "there is none", remedy, module) from error
    if modules:
        os.environ[IMPORTS] = ",".join(modules)


def import_named() -> None:
    """Imports the named modules in a Ray process."""
    for module in filter(None, os.environ.get(IMPORTS, "").split(",")):
        importlib.import_module(module)


def runtime_env() -> dict[str, Any]:
    """The `runtime_env` with which Ray's processes import these modules; {} without any."""
    if not os.environ.get(IMPORTS):
        return {}
    return {"worker_process_setup_hook": HOOK, "env_vars": {IMPORTS: os.environ[IMPORTS]}}
