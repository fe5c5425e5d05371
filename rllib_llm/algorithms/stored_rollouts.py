"""The rollout store of a run: where it lies, and what is the same in all of its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyarrow.fs import LocalFileSystem

from rllib_llm.data.encoding import vocabulary_hash
from rllib_llm.data.rollout_store import ROLLOUTS, RolloutStore
from rllib_llm.rollouts.store import AboutRun, StoredRollouts


def stored_rollouts(config: Any, storage: Any, trial_folder: Path) -> StoredRollouts:
    """The recorder of a run whose rollouts are kept.

    Args:
        config: of the run, an `RLHFConfig`.
        storage: Ray Tune's of the trial, None outside of Tune.
        trial_folder: on this machine; where storage is elsewhere, rollouts go there.
    """
    tokenizer = config.load_tokenizer()
    held_out = config.get_evaluation_config_object()
    samples_held_out = held_out is not None and held_out.explore
    about = AboutRun(
        run=trial_folder.name,
        env=str(config.env),
        num_completions=config.num_completions,
        num_held_out_completions=held_out.num_completions if samples_held_out else 1,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=config.seed or 0,
        tokenizer=tokenizer,
        vocabulary=vocabulary_hash(tokenizer),
    )
    folder, filesystem = str(trial_folder / ROLLOUTS), None
    if storage is not None and not isinstance(storage.storage_filesystem, LocalFileSystem):
        folder, filesystem = f"{storage.trial_fs_path}/{ROLLOUTS}", storage.storage_filesystem
    store = RolloutStore(folder, filesystem=filesystem, on_error=config.store_on_error)
    return StoredRollouts(store, about)
