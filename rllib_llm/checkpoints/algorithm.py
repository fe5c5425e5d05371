"""Checkpoints of an algorithm: RLlib's, saved as a whole and checked before they are read.

Under Tune an algorithm's class is one that Ray derives from ours. Pickled as it is, it names all of
our methods, and a version in which one of them is gone could not read it. So the class is written
by its name; methods that earlier versions pickled and that are gone are skipped.

A config names models, data and functions as its user gave them, and its checkpoints have the folder
that they were relative to. A path that is not found in the present folder is looked for in that
one, so a run that was moved with its files finds them, and so does a checkpoint read from
elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray
from ray import cloudpickle
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import (
    COMPONENT_ENV_RUNNER,
    COMPONENT_ENV_TO_MODULE_CONNECTOR,
    COMPONENT_EVAL_ENV_RUNNER,
    COMPONENT_LEARNER_GROUP,
    COMPONENT_MODULE_TO_ENV_CONNECTOR,
)
from ray.rllib.utils import force_list
from ray.rllib.utils.checkpoints import Checkpointable
from ray.tune.result import TIME_TOTAL_S

from rllib_llm.checkpoints.folder import (
    MANIFEST,
    PRINTED,
    CheckpointError,
    make_readable,
    newest_usable,
    read_manifest,
    write_manifest,
    written_whole,
)
from rllib_llm.shared.errors import require
from rllib_llm.shared.run_layout import RunFolder
from rllib_llm.shared.storage import is_url, local_copy, open_storage, place

SOURCES = (
    "pretrained_model", "critic_model", "data", "eval_data", "normalization_data", "ptx_data",
    "ptx_eval_data",
)  # fmt: skip
ENV_SOURCES = ("model", "tokenizer", "reward_model", "reference", "prompts", "eval_prompts")


def in_its_folder(config: Any) -> Any:
    """Return the AlgorithmConfig `config` with its relative paths as they are to be read here; one
    that has not been run yet belongs to the present folder from now on.

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
        for several in ("eval_envs", "envs"):
            if named := getattr(config, several, None):
                there = {n: _overlay_found(o, folder) for n, o in named.items()}
                setattr(config, several, there)
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
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(folder) not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([*known, str(folder)])
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
    paths = {
        name for name, value in env_config.items() if name in ENV_SOURCES
        or isinstance(value, str) and (os.sep in value or Path(value).suffix)
    }  # fmt: skip
    return {n: found(value, folder) if n in paths else value for n, value in env_config.items()}


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
    if (folder / MANIFEST).is_file():  # RLlib's own checkpoints have none
        started_in = read_manifest(folder).get("started_in")
        if started_in and Path(started_in).is_dir():
            import_also_from(Path(started_in))
    made, arguments = class_and_arguments(folder)
    found = made.get_default_config().from_state(arguments.arguments["config"])
    return in_its_folder(found) if hasattr(found, "_started_in") else found


def name_class(folder: Path) -> None:
    """Makes the checkpoint in `folder` refer to its class by name instead of pickling it."""
    file = folder / CLASS_FILE
    made = pickle.loads(file.read_bytes())
    file.write_bytes(cloudpickle.dumps({**made, "class": importable(made["class"])}))


def importable(cls: type) -> type:
    """The class from which Ray derived `cls`; `cls` itself if it is not Ray's or cannot be
    imported, as in the main script."""
    for base in cls.__mro__:
        module = sys.modules.get(base.__module__)
        if base.__name__ == cls.__name__ and getattr(module, cls.__name__, None) is base:
            return base
    return cls


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


logger = logging.getLogger(__name__)

# What samplers do is a function of the request and the weights: they have no state to keep.
SAMPLER_PARTS = (
    COMPONENT_ENV_RUNNER, COMPONENT_EVAL_ENV_RUNNER, COMPONENT_ENV_TO_MODULE_CONNECTOR,
    COMPONENT_MODULE_TO_ENV_CONNECTOR,
)  # fmt: skip

# The checkpoint that `from_checkpoint` has checked and is building an algorithm from.
_checked: ContextVar[str | None] = ContextVar("_checked", default=None)


class WholeCheckpoints(Algorithm):
    """An algorithm that saves and restores through `checkpoint_folder`.

    A checkpoint is RLlib's own folder and a manifest: models as safetensors, everything else
    RLlib's pickled state.
    """

    # Whether the iteration has begun to change what a checkpoint holds.
    has_begun_to_learn = False
    _saved_iteration: int | None = None  # of the newest checkpoint of this process

    def train(self) -> dict[str, Any]:
        """As RLlib's. An iteration of a Tune trial that fails before anything is learnt in it
        leaves a checkpoint of the state before it, which `UseFailureCheckpoints` tells Tune of."""
        self.has_begun_to_learn = False
        try:
            return super().train()
        except Exception:
            is_new = self._iterations_since_restore and self._saved_iteration != self.iteration
            if self._storage is not None and is_new and not self.has_begun_to_learn:
                try:
                    self.save()
                except Exception:  # whatever it is, the failure that is raised says more
                    logger.exception("No checkpoint could be saved before the trial ends.")
            raise

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """As RLlib's."""
        super().save_checkpoint(checkpoint_dir)
        self._saved_iteration = self.iteration

    def complete_checkpoint(self, folder: Path) -> None:
        """Adds an algorithm's own files to RLlib's state in a checkpoint, before the manifest is
        written."""

    def go_on_from(self, about: dict[str, Any]) -> None:
        """Receives a checkpoint's manifest before its state is read."""

    def save_to_path(
        self, path=None, *, state=None, filesystem=None, use_msgpack: bool = False
    ) -> str:
        """As RLlib's. In a local folder a checkpoint is replaced only when the new one is complete.
        At a URL, which has no atomic rename, the old manifest is deleted first and the new one
        written last; in between there is no checkpoint at `path`.

        Raises:
            OSError: no room, say; a checkpoint that was in the local folder `path` is as it was.
        """
        if path is None:
            path = Path(tempfile.mkdtemp()) / "checkpoint"
        filesystem, path = _resolve(path, filesystem)
        if not isinstance(filesystem, pyarrow.fs.LocalFileSystem):
            with tempfile.TemporaryDirectory() as local:
                self.save_to_path(local, state=state, use_msgpack=use_msgpack)
                upload_checkpoint(Path(local), path, filesystem)
            return path
        with written_whole(path) as folder:
            super().save_to_path(str(folder), state=state, use_msgpack=use_msgpack)
            name_class(folder)
            self.complete_checkpoint(folder)
            make_readable(folder)
            write_manifest(folder, self.about())
        return path

    def restore_from_path(self, path, *, component=None, filesystem=None, **kwargs: Any) -> None:
        """As RLlib's, from a checkpoint or from the newest usable one of a trial's folder, by path
        or by URL.

        Raises:
            CheckpointError: it is damaged or unknown, and nothing was changed by it.
        """
        if filesystem is None and is_url(path):
            path = newest_usable(path) if component is None else local_copy(path)
        filesystem, path = _resolve(path, filesystem)
        is_local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
        if component is None and is_local and path != _checked.get():
            path = str(newest_usable(path))
        if component is not None:
            kwargs["component"] = component
        elif is_local:
            self.go_on_from(read_manifest(Path(path)))
        # RLlib's `Algorithm` would send each sampler the weights as well: a request brings them.
        with self.learner_group.setting_weights():
            Checkpointable.restore_from_path(self, path, filesystem=filesystem, **kwargs)

    @classmethod
    def from_checkpoint(cls, path, filesystem=None, **kwargs: Any):
        """As RLlib's, from a checkpoint or from the newest usable one of a trial's folder."""
        if filesystem is not None or not isinstance(path, str | Path):
            return super().from_checkpoint(path, filesystem, **kwargs)
        path = str(newest_usable(path).resolve())
        made, arguments = class_and_arguments(Path(path))
        remedy = f"Use {made.__name__}.from_checkpoint"
        require(issubclass(made, cls), "checkpoint", path, f"be one of {cls.__name__}",
                f"it is one of {made.__name__}", remedy, CheckpointError)  # fmt: skip
        for name in set(kwargs) & set(arguments.signature.parameters):
            arguments.arguments[name] = kwargs.pop(name)
        algorithm = made(*arguments.args, **arguments.kwargs)
        token = _checked.set(path)
        try:
            algorithm.restore_from_path(path, **kwargs)
        finally:
            _checked.reset(token)
        return algorithm

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """As Tune's. If the machine died while the checkpoint was written, the newest usable one
        before it is restored."""
        given = Path(checkpoint_dir)
        of_trial = RunFolder(given.parent).checkpoints()
        older = of_trial[of_trial.index(given) + 1 :] if given in of_trial else []
        errors: list[CheckpointError] = []
        for candidate in [given, *older]:
            try:
                super().load_checkpoint(str(candidate))
            except CheckpointError as error:
                errors.append(error)
                continue
            if errors:
                logger.warning("%s Resuming from %s.", errors[0], candidate)
            return
        raise errors[0]

    def get_state(self, components=None, *, not_components=None, **kwargs) -> dict[str, Any]:
        """As RLlib's, without the samplers; learners in this process go on with other tensors."""
        without = [*force_list(not_components), *SAMPLER_PARTS]
        state = super().get_state(components, not_components=without, **kwargs)
        learnt = {n: copy.deepcopy(s) for n, s in state.items() if n == COMPONENT_LEARNER_GROUP}
        return state | learnt

    def set_state(self, state: dict[str, Any]) -> None:
        """As RLlib's, without the samplers: a request brings them the weights."""
        if COMPONENT_LEARNER_GROUP in state:
            self.learner_group.set_state(state[COMPONENT_LEARNER_GROUP])
        super().set_state({n: s for n, s in state.items() if n != COMPONENT_LEARNER_GROUP})

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        """The learner group alone."""
        parts = super().get_checkpointable_components()
        return [part for part in parts if part[0] == COMPONENT_LEARNER_GROUP]

    def about(self) -> dict[str, Any]:
        """Information in a checkpoint's manifest besides its files."""
        import rllib_llm

        return {
            "rllib_llm_version": rllib_llm.__version__,
            "ray_version": ray.__version__,
            "algorithm": type(self).__name__,
            "training_iteration": self.training_iteration,
            TIME_TOTAL_S: self._time_total,
            "started_in": getattr(self.config, "_started_in", None),
        }


def upload_checkpoint(folder: Path, path: str, filesystem: pyarrow.fs.FileSystem) -> None:
    """Moves a checkpoint to `path`, the manifest last; an older checkpoint there is invalidated
    first."""
    manifest = f"{path}/{MANIFEST}"
    if filesystem.get_file_info(manifest).type == pyarrow.fs.FileType.File:
        filesystem.delete_file(manifest)
    filesystem.create_dir(path, recursive=True)
    last = (folder / MANIFEST).read_bytes()
    (folder / MANIFEST).unlink()
    pyarrow.fs.copy_files(str(folder), path, destination_filesystem=filesystem)
    with filesystem.open_output_stream(manifest) as stream:
        stream.write(last)


def _resolve(path: Any, filesystem: Any) -> tuple[pyarrow.fs.FileSystem, str]:
    """File system and path, of a URI as well; relative paths are local ones."""
    if filesystem is not None:
        return filesystem, str(path)
    if "://" in str(path):
        return open_storage(str(path))
    return pyarrow.fs.LocalFileSystem(), str(Path(path).resolve())


def restore_source(
    given: str, algo_class: type, where: str, stop: Mapping[str, Any] | None = None
) -> Path:
    """Return the checkpoint folder from which trials of `algo_class` start, to end at `stop`.

    Raises:
        Problems: there is none, or, for an algorithm of ours, no usable one, or one that is at
            the trials' end already.
    """
    folder = place(given)
    require(folder.is_dir(), where, given, "be a checkpoint folder", "there is none", PRINTED)
    if not issubclass(algo_class, WholeCheckpoints):
        return local_copy(folder).resolve()
    source = newest_usable(folder)
    done = read_manifest(source)["training_iteration"]
    limit = (stop or {}).get("training_iteration")
    require(limit is None or limit > done, "stop.training_iteration", limit,
            f"be above {done}, where {where}={given!r} is",
            "iterations count on from a checkpoint", "Raise it to the total")  # fmt: skip
    return source.resolve()


def find_checkpoint(folder: str | Path) -> Path:
    """Return the checkpoint of an algorithm that `folder` is, or the newest usable one in it.

    Raises:
        CheckpointError: there is none, saying what is wrong with the newest.
    """
    try:
        return newest_usable(folder)
    except CheckpointError:
        # RLlib's own algorithms know no manifest.
        given = place(folder)
        for candidate in [given, *RunFolder(given).checkpoints()]:
            if (candidate / CLASS_FILE).is_file():
                copy, cut_off = local_copy(candidate), (pickle.UnpicklingError, EOFError)
                with contextlib.suppress(*cut_off, AttributeError, ImportError):
                    cls = pickle.loads((copy / CLASS_FILE).read_bytes())["class"]
                    if issubclass(cls, Algorithm) and not issubclass(cls, WholeCheckpoints):
                        return copy
        raise
