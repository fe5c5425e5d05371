"""Where the model lies in what a user points at: a checkpoint, a trial, or the model itself."""

from __future__ import annotations

from pathlib import Path

from rllib_llm.checkpoints.fetching import fetched
from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT, checkpoints_in, newest_usable
from rllib_llm.shared.errors import UserError
from rllib_llm.shared.storage import UrlPath, is_url, local_copy


def _here(given: str) -> Path:
    if not is_url(given):
        return Path(given).expanduser()
    inner = next(
        (part for part in (UrlPath(given), UrlPath(given) / "model")
         if (part / "config.json").is_file()), None,
    )  # fmt: skip
    return fetched(given) if inner is None else local_copy(inner)


def find_model(given: str) -> str:
    """Return the Hugging Face folder in `given`; hub ids and dotted paths are returned unchanged.

    In the folder of a run or of a stage with one trial, the trial is meant.

    Raises:
        UserError: `given` is a folder without a model in it, or with several trials.
        CheckpointError: it is a checkpoint, or the folder of a trial, and none is usable.
    """
    folder = _here(given)
    if not folder.exists():
        if given.startswith((".", "/", "~")) or given.count("/") > 1:
            raise UserError(
                f"checkpoint={given!r} must be a folder: there is none. `rllib train` prints the "
                "checkpoints and models it wrote."
            )
        return given
    for candidate in (folder, folder / "model"):
        if (candidate / "config.json").is_file():
            return str(candidate)
    if trials := _trials_below(folder):
        if len(trials) > 1:
            raise UserError(
                f"checkpoint={given!r} must be one trial: it holds {len(trials)}. Give one of "
                + ", ".join(map(str, trials))
            )
        folder = trials[0]
    if not (checkpoints_in(folder) or (folder / MODEL_IN_CHECKPOINT).is_dir()):
        raise UserError(
            f"checkpoint={given!r} must hold a model: there is no config.json in it, nor in "
            f"{MODEL_IN_CHECKPOINT} or model below it. Give a checkpoint of a language model."
        )
    return str(newest_usable(folder) / MODEL_IN_CHECKPOINT)


def _trials_below(folder: Path) -> list[Path]:
    """The trials with checkpoints in the folder of a run or of a stage."""
    found = [*folder.glob("*/checkpoint_*"), *folder.glob("*/*/checkpoint_*")]
    return sorted({path.parent for path in found if path.is_dir()})
