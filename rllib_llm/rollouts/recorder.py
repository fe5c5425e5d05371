"""What became of every prompt group, told to whoever keeps rollouts."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from rllib_llm.rollouts.request import JudgedBatch

Status = Literal["trained", "rejected", "failed", "evaluated"]
"""Learnt from; refused by a filter, as too old or for its lost members; not to be had from any
sampler; held-out rows of an evaluation."""


class RolloutRecorder(Protocol):
    """Keeps rollouts. It is called in the driver's process, once for each closed group."""

    def record(
        self, groups: JudgedBatch, status: Status, *, iteration: int, reason: str = ""
    ) -> None:
        """Takes whole groups that were closed alike.

        Args:
            groups: their rows, on any device. `columns.GROUP` names each row's group, and
                `columns.ADVANTAGES` is there where the learner handed it back.
            status: what became of them.
            iteration: in which they were closed, from 1.
            reason: why they were rejected or failed, one word; "" otherwise.
        """

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, with all that was recorded written."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken: what was recorded later counts as not recorded."""

    def metrics(self) -> dict[str, float]:
        """What it has written so far, and what that took."""

    def stop(self) -> None:
        """Writes what is still to be written, and ends."""


class RecordsNothing:
    """The recorder of a run that keeps no rollouts."""

    def record(
        self, groups: JudgedBatch, status: Status, *, iteration: int, reason: str = ""
    ) -> None:
        """Does nothing."""

    def state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing."""

    def metrics(self) -> dict[str, float]:
        return {}

    def stop(self) -> None:
        """Does nothing."""
