"""The class that made a checkpoint, its arguments as RLlib keeps them, and where it was run.

Under Tune an algorithm's class is one that Ray derives from ours. Pickled as it is, it names all of
our methods, and a version in which one of them is gone could not read it. So the class is written
by its name; of checkpoints of earlier versions, what is gone is passed over.

A config names models, data and functions as its user gave them, and its checkpoints note the folder
that they were relative to. What is not found in the present folder is looked for there: a run that
was moved with its files, and a checkpoint that is read from elsewhere, both find them.
"""

from __future__ import annotations

import inspect
import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.rllib.utils.checkpoints import Checkpointable

from rllib_llm.checkpoints.folder import MANIFEST, read_manifest

SOURCES = (
    "pretrained_model", "critic_model", "data", "eval_data", "normalization_data", "ptx_data",
    "ptx_eval_data",
)  # fmt: skip
ENV_SOURCES = ("model", "tokenizer", "reward_model", "reference", "prompts", "eval_prompts")


def in_its_folder(config: Any) -> Any:
    """Return the AlgorithmConfig `config` with its relative paths as they are to be read here; one
    that has not been run yet is noted to belong to the present folder.

    Modules in the folder where it was run can be imported afterwards.
    """
    config = config.copy(copy_frozen=False)
    if config._started_in is None:
        config._started_in = os.getcwd()
    folder = Path(config._started_in)
    if folder != Path.cwd() and folder.is_dir():
        import_also_from(folder)
        for name in SOURCES:
            if hasattr(config, name):
                setattr(config, name, found(getattr(config, name), folder))
        config.env_config = _env_found(config.env_config, folder)
        config.evaluation_config = _overlay_found(config.evaluation_config, folder)
        named = getattr(config, "eval_envs", None)
        if named:
            config.eval_envs = {n: _overlay_found(o, folder) for n, o in named.items()}
    config.freeze()
    return config


def _overlay_found(overlay: Any, folder: Path) -> Any:
    """Settings of an evaluation, the paths in their `env_config` found."""
    if not isinstance(overlay, Mapping) or not isinstance(overlay.get("env_config"), Mapping):
        return overlay
    return {**overlay, "env_config": _env_found(overlay["env_config"], folder)}


def import_also_from(folder: Path) -> None:
    """Makes modules in `folder` importable after all others, here and in processes of a Ray that
    is started later."""
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*known, str(folder)]))
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def found(source: Any, folder: Path) -> Any:
    """Return a setting that names a model or data, its path absolute if it is only in `folder`."""
    if isinstance(source, str):
        return _path_found(source, folder)
    if isinstance(source, Mapping):
        keys = [key for key in ("path", "model") if key in source]
        return {**source, **{key: found(source[key], folder) for key in keys}}
    if isinstance(source, list) and all(isinstance(item, str) for item in source):
        return [_path_found(item, folder) for item in source]
    return source


def _env_found(env_config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """As `found`, for our environments' settings and for others that look like a path."""
    return {
        name: found(value, folder) if name in ENV_SOURCES or _looks_like_path(value) else value
        for name, value in env_config.items()
    }


def _looks_like_path(value: Any) -> bool:
    return isinstance(value, str) and (os.sep in value or bool(Path(value).suffix))


def _path_found(text: str, folder: Path) -> str:
    path = Path(text).expanduser()
    if not text or path.is_absolute() or _is_there(path):
        return text
    return str(folder / path) if _is_there(folder / path) else text


def _is_there(path: Path) -> bool:
    """Whether the path, or for a pattern any path, exists."""
    if any(character in path.name for character in "*?["):
        return path.parent.is_dir() and any(path.parent.glob(path.name))
    return path.exists()


CLASS_FILE = Checkpointable.CLASS_AND_CTOR_ARGS_FILE_NAME


def class_and_arguments(folder: Path) -> tuple[type[Any], inspect.BoundArguments]:
    """The class that made the checkpoint in `folder`, and the arguments it was made with."""
    with (folder / CLASS_FILE).open("rb") as stream:
        made = _Reader(stream).load()
    cls = importable(made["class"])
    args, kwargs = made["ctor_args_and_kwargs"]
    return cls, inspect.signature(cls).bind(*args, **kwargs)


def saved_config(folder: Path) -> Any:
    """The config that the checkpoint in `folder` was made with, its relative paths as they are to
    be read here. Modules where the run was started can be imported afterwards."""
    manifest = folder / MANIFEST
    if manifest.is_file():  # RLlib's own checkpoints have none
        started_in = read_manifest(folder).get("started_in")
        if started_in and Path(started_in).is_dir():
            import_also_from(Path(started_in))
    made, arguments = class_and_arguments(folder)
    found = made.get_default_config().from_state(arguments.arguments["config"])
    return in_its_folder(found) if hasattr(found, "_started_in") else found


def name_class(folder: Path) -> None:
    """Makes the checkpoint in `folder` refer to its class by name instead of pickling it."""
    with (folder / CLASS_FILE).open("rb") as stream:
        made = pickle.load(stream)
    made["class"] = importable(made["class"])
    (folder / CLASS_FILE).write_bytes(cloudpickle.dumps(made))


def importable(cls: type) -> type:
    """The class from which Ray derived `cls`; `cls` itself if it is not Ray's or cannot be
    imported, as in the main script."""
    alike = [base for base in cls.__mro__ if base.__name__ == cls.__name__]
    return next((base for base in alike if _is_found(base)), cls)


def _is_found(cls: type) -> bool:
    return getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls


class _Reader(pickle.Unpickler):
    """An unpickler that replaces missing names of this package by None: methods that Ray listed and
    that have been renamed since."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except AttributeError:
            if not module.startswith("rllib_llm."):
                raise
            return None
