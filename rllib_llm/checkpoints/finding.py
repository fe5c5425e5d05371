"""The checkpoint that a user means: the one named, or the newest usable one of a trial."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rllib_llm.checkpoints.fetching import fetched
from rllib_llm.checkpoints.folder import (
    CheckpointError,
    checkpoints_in,
    newest_usable,
    read_manifest,
)
from rllib_llm.checkpoints.whole import WholeCheckpoints
from rllib_llm.shared.errors import UserError


def restore_source(
    given: str, algo_class: type, where: str, stop: Mapping[str, Any] | None = None
) -> Path:
    """Return the checkpoint folder from which trials of `algo_class` start, to end at `stop`.

    Raises:
        UserError: there is none, or, for an algorithm of ours, no usable one, or one that is at
            the trials' end already.
    """
    folder = fetched(given)
    if not folder.is_dir():
        raise UserError(
            name=where,
            value=given,
            rule="be a checkpoint folder",
            reason="there is none",
            remedy="`rllib train` prints the checkpoints it wrote",
        )
    if not issubclass(algo_class, WholeCheckpoints):
        return folder.resolve()
    source = newest_usable(folder)
    done = read_manifest(source)["training_iteration"]
    limit = (stop or {}).get("training_iteration")
    if limit is not None and limit <= done:
        raise UserError(
            name="stop.training_iteration",
            value=limit,
            rule=f"be above {done}, where {where}={given!r} is",
            reason="iterations count on from a checkpoint",
            remedy="Raise it to the total",
        )
    return source.resolve()


def find_checkpoint(folder: str | Path) -> Path:
    """Return the checkpoint of an algorithm that `folder` is, or the newest usable one in it.

    Raises:
        CheckpointError: there is none, saying what is wrong with the newest.
    """
    from ray.rllib.algorithms import Algorithm

    folder = fetched(folder)
    try:
        return newest_usable(folder)
    except CheckpointError:
        # RLlib's own algorithms know no manifest.
        for candidate in [folder, *checkpoints_in(folder)]:
            if _is_stock(candidate / Algorithm.CLASS_AND_CTOR_ARGS_FILE_NAME):
                return candidate
        raise


def _is_stock(file: Path) -> bool:
    """Whether `file` names an RLlib algorithm that is none of ours."""
    if not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            made_by = pickle.load(stream)["class"]
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError):
        return False  # cut off
    return not issubclass(made_by, WholeCheckpoints)
