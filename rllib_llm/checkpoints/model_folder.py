"""Where the model lies in what a user points at: a checkpoint, a trial, or the model itself."""

from __future__ import annotations

from pathlib import Path

from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT, checkpoints_in, newest_usable
from rllib_llm.user_errors import UserError


def find_model(given: str) -> str:
    """Return the Hugging Face folder in `given`; hub ids and dotted paths are returned unchanged.

    Raises:
        UserError: `given` is a folder without a model in it.
        CheckpointError: it is a checkpoint, or the folder of a trial, and none is usable.
    """
    folder = Path(given).expanduser()
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
    if not (checkpoints_in(folder) or (folder / MODEL_IN_CHECKPOINT).is_dir()):
        raise UserError(
            f"checkpoint={given!r} must hold a model: there is no config.json in it, nor in "
            f"{MODEL_IN_CHECKPOINT} or model below it. Give a checkpoint of a language model."
        )
    return str(newest_usable(folder) / MODEL_IN_CHECKPOINT)
