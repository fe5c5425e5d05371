"""Rows of many groups in one engine, which enter and leave at any step.

A group is finished when the last of its rows has ended. New weights come between two steps; each
token carries the version that sampled it, stamped by the engine. Rows never begin on weights before
those of their lease.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from rllib_llm.engines.hot_swap import HotSwapEngine
from rllib_llm.engines.protocol import (
    NOT_FINITE,
    Ended,
    Engine,
    InFlight,
    Noise,
    Row,
    Tokens,
    pad_completions,
)
from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.modules.images import refuse_images
from rllib_llm.rollouts.groups import Lease, PartialCompletion
from rllib_llm.rollouts.judged_batch import SampleRequest
from rllib_llm.rollouts.policy import ModulePolicy, SamplingPolicy
from rllib_llm.rollouts.sampler import Sampler, UnjudgedBatch
from rllib_llm.shared import columns
from rllib_llm.weights.coordinator import PublishedWeights


@dataclass
class _Group:
    """A group that is being sampled."""

    lease: Lease
    request: SampleRequest
    prompts: dict[str, torch.Tensor]  # its columns
    before: Sequence[PartialCompletion]  # what its rows came with
    has_begun: bool = False
    ended: dict[int, PartialCompletion] = field(default_factory=dict)  # whole completions, by place


class RowStream:
    """The groups that one sampler is at work on. Their rows continue on new weights, or finish on
    those they started with: then there are two modules, which change places with each load.

    Args:
        masks_stale_prefix: whether of a completion only the tokens of its newest weights are
            learnt from.
    """

    def __init__(
        self, sampler: Sampler, num_completions: int, *, in_flight: InFlight,
        masks_stale_prefix: bool = False,
    ) -> None:  # fmt: skip
        self._sampler, self._n = sampler, num_completions
        self._in_flight, self._masks_stale_prefix = in_flight, masks_stale_prefix
        self._groups: dict[int, _Group] = {}  # by position
        self._newest: PublishedWeights | None = None
        self._newest_order = 0  # of their publication
        self._is_loaded = False
        self._order = 0  # of those that new rows begin on
        self._engine = self._open()

    def _open(self) -> Engine:
        sampler = self._sampler
        # vLLM has one copy of the weights: new rows wait for those that finish on the old ones.
        if self._in_flight != "finish" or not isinstance(sampler.policy, ModulePolicy):
            return self._engine_of(sampler.policy)
        sampler.older_policy = sampler.older_policy or sampler.policy.another()
        newest, older = self._engine_of(sampler.policy), self._engine_of(sampler.older_policy)
        return HotSwapEngine(cast(TorchEngine, newest), cast(TorchEngine, older))

    def _engine_of(self, policy: SamplingPolicy) -> Engine:
        return policy.open_engine(None, load_weights=functools.partial(self._put, policy))

    @property
    def num_groups(self) -> int:
        """Groups that are not finished yet."""
        return len(self._groups)

    @property
    def leases(self) -> set[int]:
        """Ids of the leases that they are of."""
        return {group.lease.id for group in self._groups.values()}

    def is_news(self, weights: PublishedWeights, order: int) -> bool:
        """Whether these weights are newer than the last. Calls to the ledger can overtake one
        another."""
        newest = self._newest
        return newest is None or (weights.key != newest.key and order >= self._newest_order)

    def load(self, weights: PublishedWeights, order: int) -> None:
        """Samples with these as soon as may be, if they are news; see `Engine.load`."""
        is_news = self.is_news(weights, order)
        self._newest_order = max(self._newest_order, order)
        if is_news:
            self._newest, self._is_loaded = weights, False
            self._engine.load({}, weights.version, self._in_flight)
        self._note_loaded()

    def _put(self, policy: SamplingPolicy, _: Mapping[str, torch.Tensor]) -> None:
        """Puts the newest weights into a policy, which is the sampler's from now on."""
        sampler = self._sampler
        assert self._newest is not None, "weights are given before they are loaded"
        sampler.weights.receive(self._newest, policy.load)
        if policy is sampler.older_policy:
            sampler.policy, sampler.older_policy = sampler.older_policy, sampler.policy
        self._is_loaded = True

    def _note_loaded(self) -> None:
        if self._is_loaded:
            self._order = self._newest_order

    def add(self, lease: Lease) -> list[tuple[Exception, list[int]]]:
        """Starts the groups of a lease, or resumes their partial output. They wait if new rows
        would start on weights before the lease's. Partial output under an earlier lease is
        discarded.

        Returns:
            What was raised, and the positions of the groups that are not sampled for it.
        """
        self._give_up([position for position in lease.positions if position in self._groups])
        failed: list[tuple[Exception, list[int]]] = []
        groups = {}
        for position in lease.positions:
            try:
                groups[position] = self._group(lease, position)
            except Exception as error:  # noqa: BLE001  (a prompt's; reported to the ledger)
                failed.append((error, [position]))
        self._groups |= groups
        try:
            self._begin_waiting(groups)
        except Exception as error:  # noqa: BLE001  (reported to the ledger)
            for position in groups:
                del self._groups[position]
            failed.append((error, list(groups)))
        return failed

    def _group(self, lease: Lease, position: int) -> _Group:
        request = SampleRequest(position, 1, self._n, return_texts=lease.return_texts)
        prompts = self._sampler.environment.prompts(request)
        refuse_images(prompts)
        prompt = zlib.crc32(
            prompts[columns.PROMPT_IDS][0][prompts[columns.PROMPT_MASK][0]].cpu().numpy()
        )
        before = lease.partial.get(position, ())
        if not self._can_continue(before, prompt):
            before = (PartialCompletion((), (), (), prompt=prompt),) * self._n
        return _Group(lease, request, prompts, before)

    def _can_continue(self, before: Sequence[PartialCompletion], prompt: int) -> bool:
        """Whether these settings and data could have made this partial output: a restored run may
        have others."""
        longest = self._sampler.params(True).max_new_tokens

        def fits(row: PartialCompletion) -> bool:
            room = longest - len(row.token_ids)
            return {"length": room == 0, "aborted": room > 0}.get(row.finish, room >= 0)

        return len(before) == self._n and all(
            row.prompt in (0, prompt) and fits(row) for row in before
        )

    def begun_anew(self, lease: Lease) -> list[int]:
        """Positions of a lease whose partial output could not be continued."""
        return [
            position for position, before in lease.partial.items()
            if position in self._groups and self._groups[position].before is not before
        ]  # fmt: skip

    def _begin_waiting(self, groups: Mapping[int, _Group]) -> None:
        """Begins those of these groups that wait, if their weights are there."""
        waiting = {
            position: group
            for position, group in groups.items()
            if not group.has_begun and group.lease.order <= self._order
        }
        rows = [row for position, group in waiting.items() for row in self._rows(position, group)]
        if rows:
            self._engine.add(rows)
        for group in waiting.values():
            group.has_begun = True

    def _rows(self, position: int, group: _Group) -> list[Row]:
        params, seed = self._sampler.params(True), self._sampler.seed
        mask = group.prompts[columns.PROMPT_MASK][0]
        prompt = group.prompts[columns.PROMPT_IDS][0][mask].tolist()
        rows = []
        for i, row_id in enumerate(group.prompts[columns.ROW_ID].tolist()):
            if group.before[i].finish in ("stop", "length"):
                group.ended[i] = group.before[i]
                continue
            held = group.before[i].token_ids
            rows.append(
                Row((position, i), [*prompt, *held], params, num_sampled=len(held),
                    noise=Noise(seed, row_id), group=position)
            )  # fmt: skip
        return rows

    def drop(self, lease: int) -> None:
        """Gives the groups of a lease up, which another sampler has now."""
        self._give_up([p for p, group in self._groups.items() if group.lease.id == lease])

    def _give_up(self, positions: Iterable[int]) -> None:
        for position in positions:
            if self._groups.pop(position).has_begun:
                self._engine.abort([(position, i) for i in range(self._n)])

    def step(self) -> list[tuple[Lease, UnjudgedBatch]]:
        """Samples a token for every row; the groups that are finished, to be judged.

        Raises:
            FloatingPointError: the model's logits are not finite.
        """
        ended_rows = self._engine.step()
        self._note_loaded()
        self._begin_waiting(self._groups)
        for ended in ended_rows:
            row_id: Any = ended.id
            position, i = row_id
            if ended.finish == "error":
                raise FloatingPointError(NOT_FINITE)
            group = self._groups[position]
            group.ended[i] = _joined(group.before[i], ended, ended.finish)
        finished = [p for p, group in self._groups.items() if len(group.ended) == self._n]
        groups = [self._groups.pop(position) for position in finished]
        return [(group.lease, self._generated(group)) for group in groups]

    def _generated(self, group: _Group) -> UnjudgedBatch:
        weights = self._sampler.weights
        rows, pad = [group.ended[i] for i in range(self._n)], self._sampler.policy.pad_token_id
        made = pad_completions(rows, pad, with_versions=True).columns()
        return UnjudgedBatch(
            group.request, weights.version, group.prompts, made, weights.version,
            weights=weights.metrics(), masks_stale_prefix=self._masks_stale_prefix,
        )  # fmt: skip

    def partial(self) -> dict[int, dict[int, tuple[PartialCompletion, ...]]]:
        """The partial output of each group, by lease and position."""
        found: dict[int, dict[int, tuple[PartialCompletion, ...]]] = {}
        for position, group in self._groups.items():
            if not group.has_begun:
                continue
            running = [i for i in range(self._n) if i not in group.ended]
            read = self._engine.sampled([(position, i) for i in running], [0] * len(running))
            held = dict(group.ended)
            for i, tokens in zip(running, read, strict=True):
                held[i] = _joined(group.before[i], tokens, tokens.finish or "aborted")
            rows = tuple(held[i] for i in range(self._n))
            found.setdefault(group.lease.id, {})[position] = rows
        return found

    def close(self) -> None:
        """Frees the engine."""
        self._engine.close()


def _joined(before: PartialCompletion, rest: Ended | Tokens, finish: str) -> PartialCompletion:
    """A row's initial tokens followed by those sampled since."""
    names = ("token_ids", "logprobs", "versions")
    ids, logprobs, versions = ((*getattr(before, n), *getattr(rest, n)) for n in names)
    return PartialCompletion(ids, logprobs, versions, finish, before.prompt)
