"""Checkpoints by URL, brought to this machine: all that reads them reads files."""

from __future__ import annotations

from pathlib import Path

from rllib_llm.checkpoints.folder import CheckpointError, check
from rllib_llm.shared.storage import UrlPath, is_url, local_copy


def fetched(given: str | Path) -> Path:
    """The folder that is meant: `given` itself, or a copy of the newest usable checkpoint at the
    URL of one, of a trial or of a stage with one trial.

    Raises:
        CheckpointError: there is none, saying what is wrong with the newest.
    """
    if not is_url(given):
        return Path(given).expanduser()
    url = UrlPath(str(given))
    if not (found := [*url.glob("checkpoint_*")] or [*url.glob("*/checkpoint_*")]):
        return local_copy(url)
    trials = sorted({path.parent.name for path in found})
    if len(trials) > 1:
        raise CheckpointError(
            f"checkpoint={str(url)!r} must be a checkpoint or the folder of one trial: there are "
            f"{len(trials)} trials in it. Choose one of {', '.join(trials)}."
        )
    errors = []
    for candidate in sorted(found, key=lambda path: path.name, reverse=True):
        try:
            copy = local_copy(candidate)
            check(copy)
            return copy
        except CheckpointError as error:
            errors.append(error)
    raise errors[0]
