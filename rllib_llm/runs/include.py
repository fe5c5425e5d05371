"""`include: FILE` at the top of a YAML file: what several files share is written once.

The experiments of the included files come first, in their order. What this file says under the same
name is laid over them, key by key; an experiment that it sets to null is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rllib_llm
from rllib_llm.runs.search_space import LISTS, SAMPLERS
from rllib_llm.runs.yaml_loader import read
from rllib_llm.shared.errors import UserError

KEY = "include"
HERE = "${here}"


def examples_folder() -> Path:
    """Return the examples' folder: inside an installed package, beside it in a checkout."""
    package = Path(rllib_llm.__file__).resolve().parent
    inside = package / "tuned_examples"
    return inside if inside.is_dir() else package.parent / "tuned_examples"


def with_includes(
    data: dict[str, Any], source: str, here: Path | None, inside: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """Return `data`, a parsed file, laid over the files that it includes.

    Args:
        source: the file's name for errors.
        here: its folder; included files are looked for there, then among the examples.
        inside: the files that include this one.

    Raises:
        UserError: no such file, or one that includes itself.
    """
    data = dict(data)
    names = data.pop(KEY, None) or []
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"{source}: include={names!r} must be a file or a list of files: what they say comes "
            "before this one. Write `include: other.yaml`."
        )
    if not names:
        return data
    merged: dict[str, Any] = {}
    for name in names:
        path = _found(name, here)
        if path in inside:
            raise UserError(
                f"{source}: include={name!r} must not lead back to {path.name}: it would never "
                "end. Take one of the two out."
            )
        included = _placed(read(path), str(path.parent))
        if not isinstance(included, dict):
            raise UserError(f"{path} must hold experiments: {source} includes it. Check the file.")
        merged = laid_over(merged, with_includes(included, str(path), path.parent, (*inside, path)))
    merged = laid_over(merged, data)
    return {key: value for key, value in merged.items() if value is not None or key == "vars"}


def _found(name: str, here: Path | None) -> Path:
    """The file beside the including one, else the example of that name, else the former."""
    beside = ((here or Path()) / name).resolve()
    example = examples_folder() / name
    return example.resolve() if not beside.is_file() and example.is_file() else beside


def _placed(value: Any, folder: str) -> Any:
    """`value` with ${here} replaced: it means the folder of the file that it stands in."""
    if isinstance(value, dict):
        return {key: _placed(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_placed(item, folder) for item in value]
    return value.replace(HERE, folder) if isinstance(value, str) else value


def laid_over(below: Any, above: Any) -> Any:
    """`above`, with what `below` has beside it where both are mappings; search spaces are whole."""
    both = isinstance(below, dict) and isinstance(above, dict)
    if not both or _is_space(below) or _is_space(above):
        return above
    merged = {key: laid_over(value, above[key]) if key in above else value
              for key, value in below.items()}  # fmt: skip
    return merged | {key: value for key, value in above.items() if key not in below}


def _is_space(value: dict[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value)) in (*SAMPLERS, *LISTS)
