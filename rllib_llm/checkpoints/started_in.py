"""Relative paths of a run, in a process that works in another folder than the run did.

A config names models, data and functions as its user gave them, and its checkpoints note the folder
that they were relative to. What is not found in the present folder is looked for there: a run that
was moved with its files, and a checkpoint that is read from elsewhere, both find them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
