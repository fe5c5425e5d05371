"""The recorder that keeps rollouts in the rollout store."""

from __future__ import annotations

import datetime
import functools
from typing import Any

from rllib_llm.data.rollout_store import RolloutStore
from rllib_llm.rollouts.recorder import Status
from rllib_llm.rollouts.request import JudgedBatch
from rllib_llm.rollouts.stored_rows import AboutRun, rows_of


class StoredRollouts:
    """A `RolloutRecorder` that writes each completion as a row, in the background.

    Args:
        store: takes the rows.
        about: what is the same in all of them.
    """

    def __init__(self, store: RolloutStore, about: AboutRun) -> None:
        self._store = store
        self._about = about

    def record(
        self, groups: JudgedBatch, status: Status, *, iteration: int, reason: str = ""
    ) -> None:
        """Waits where the disk is slower than the run.

        Raises:
            RolloutStoreError: nothing can be written, and the run is to stop then.
        """
        # Rows that wait hold no memory of a GPU, and the caller may add columns meanwhile.
        groups = groups.to("cpu")
        ended = datetime.datetime.now(datetime.UTC)
        make = functools.partial(
            rows_of, groups, self._about, status=status, reason=reason, ended=ended
        )
        self._store.put(iteration, groups.num_rows, make)

    def state(self) -> dict[str, Any]:
        return self._store.state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._store.set_state(state)

    def metrics(self) -> dict[str, float]:
        """As the store's."""
        return self._store.metrics()

    def stop(self) -> None:
        self._store.stop()
