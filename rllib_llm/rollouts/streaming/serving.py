"""A lease served as one batch: prompts, completions, scores, filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rllib_llm.engines.protocol import InFlight
from rllib_llm.rollouts.failure import SampleFailure
from rllib_llm.rollouts.filters import Filters
from rllib_llm.rollouts.request import JudgedBatch, SampleRequest
from rllib_llm.rollouts.streaming.entry import JudgedGroup, Lease
from rllib_llm.rollouts.streaming.packing import judged_group, split
from rllib_llm.weights.published import PublishedWeights

Serve = Callable[[SampleRequest, PublishedWeights], JudgedBatch | SampleFailure]


@dataclass(frozen=True)
class ServingSettings:
    """What every sampler of a stream goes by.

    num_completions: of each prompt.
    groups_per_lease: that it asks for at once.
    min_valid: completions with a score that a group needs.
    filters: see `Filters`.
    by_row: whether groups are sampled row by row, in an engine that new weights reach between two
        steps, where the sampler can.
    max_groups: that a sampler is at work on at once, row by row.
    in_flight: see `Engine.load`.
    masks_stale_prefix: see `RowStream`.
    """

    num_completions: int
    groups_per_lease: int = 1
    min_valid: int = 1
    filters: tuple[str | Mapping[str, Any], ...] = ()
    by_row: bool = False
    max_groups: int = 1
    in_flight: InFlight = "finish"
    masks_stale_prefix: bool = False


class GroupJudge:
    """Makes of a judged batch what is handed in."""

    def __init__(self, settings: ServingSettings) -> None:
        self._min_valid = settings.min_valid
        self._filters = Filters(settings.filters)

    def groups(self, batch: JudgedBatch, *, continues: bool = False) -> list[JudgedGroup]:
        """The groups of a batch, each with what filters say of it."""
        return [
            judged_group(
                group, reason=self._filters.reason(group), min_valid=self._min_valid,
                continues=continues,
            )
            for group in split(batch)
        ]  # fmt: skip


class LeaseServer:
    """Has leases served by whatever serves requests, all groups of a lease as one batch.

    What is computed together is the same for whoever serves it, and so is the round-off.
    """

    def __init__(self, serve: Serve, settings: ServingSettings) -> None:
        self.settings = settings
        self._serve = serve
        self._judge = GroupJudge(settings)

    def groups(self, lease: Lease) -> list[JudgedGroup] | SampleFailure:
        """The judged groups of a lease, in order, or what was raised in the sampler."""
        request = SampleRequest(
            position=lease.position,
            num_prompts=lease.num_groups,
            num_completions=self.settings.num_completions,
            return_texts=lease.return_texts,
        )
        answer = self._serve(request, lease.weights)
        if isinstance(answer, SampleFailure):
            return answer
        return self._judge.groups(answer)
