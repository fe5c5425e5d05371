"""The class that made a checkpoint, and its arguments, as RLlib keeps them beside the state.

Under Tune an algorithm's class is one that Ray derives from ours. Pickled as it is, it names all of
our methods, and a version in which one of them is gone could not read it. So the class is written
by its name; of checkpoints of earlier versions, what is gone is passed over.
"""

from __future__ import annotations

import inspect
import pickle
import sys
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.rllib.utils.checkpoints import Checkpointable

from rllib_llm.checkpoints.folder import MANIFEST, read_manifest
from rllib_llm.checkpoints.started_in import import_also_from, in_its_folder

FILE = Checkpointable.CLASS_AND_CTOR_ARGS_FILE_NAME


def read(folder: Path) -> tuple[type[Any], inspect.BoundArguments]:
    """The class that made the checkpoint in `folder`, and the arguments it was made with."""
    with (folder / FILE).open("rb") as stream:
        made = _Reader(stream).load()
    cls = importable(made["class"])
    args, kwargs = made["ctor_args_and_kwargs"]
    return cls, inspect.signature(cls).bind(*args, **kwargs)


def config(folder: Path) -> Any:
    """The config that the checkpoint in `folder` was made with, its relative paths as they are to
    be read here. Modules where the run was started can be imported afterwards."""
    manifest = folder / MANIFEST
    if manifest.is_file():  # RLlib's own checkpoints have none
        started_in = read_manifest(folder).get("started_in")
        if started_in and Path(started_in).is_dir():
            import_also_from(Path(started_in))
    made, arguments = read(folder)
    found = made.get_default_config().from_state(arguments.arguments["config"])
    return in_its_folder(found) if hasattr(found, "_started_in") else found


def name_class(folder: Path) -> None:
    """Has the checkpoint in `folder` name its class instead of describing it."""
    with (folder / FILE).open("rb") as stream:
        made = pickle.load(stream)
    made["class"] = importable(made["class"])
    (folder / FILE).write_bytes(cloudpickle.dumps(made))


def importable(cls: type) -> type:
    """What Ray derived `cls` from; `cls` itself where it is not Ray's or has no place to be found
    in, as in the script that is run."""
    alike = [base for base in cls.__mro__ if base.__name__ == cls.__name__]
    return next((base for base in alike if _is_found(base)), cls)


def _is_found(cls: type) -> bool:
    return getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls


class _Reader(pickle.Unpickler):
    """Has None where something of this package is gone: a method that Ray listed, and nobody calls
    by that name now."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except AttributeError:
            if not module.startswith("rllib_llm."):
                raise
            return None
