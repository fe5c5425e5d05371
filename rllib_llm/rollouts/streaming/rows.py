"""Rows of many groups in one engine, which enter and leave at any step.

A group is judged when the last of its rows has ended. New weights come between two steps; each
token carries the version that sampled it, stamped by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from rllib_llm import columns
from rllib_llm.engines.completions import Tokens as Sampled
from rllib_llm.engines.protocol import Ended, InFlight, Noise, Row
from rllib_llm.rollouts.request import NO_VERSION, JudgedBatch, SampleRequest
from rllib_llm.rollouts.sampler import Sampler
from rllib_llm.rollouts.streaming.entry import Lease, Tokens
from rllib_llm.rollouts.streaming.row_engine import open_row_engine
from rllib_llm.weights.published import PublishedWeights

_NOTHING = Tokens((), (), ())


@dataclass
class _Group:
    """A group that is being sampled."""

    lease: Lease
    prompts: dict[str, torch.Tensor]  # its columns
    before: list[Tokens]  # what its rows came with
    ended: dict[int, Tokens] = field(default_factory=dict)  # whole completions, by place


class RowStream:
    """The groups that one sampler is at work on.

    Args:
        sampler: its environment, policy and weights.
        num_completions: of each prompt.
        in_flight: what becomes of rows in the engine when new weights come.
        masks_stale_prefix: whether of a completion only the tokens of its newest weights are
            learnt from.
    """

    def __init__(
        self,
        sampler: Sampler,
        num_completions: int,
        *,
        in_flight: InFlight,
        masks_stale_prefix: bool = False,
    ) -> None:
        self._sampler, self._n = sampler, num_completions
        self._masks_stale_prefix = masks_stale_prefix
        self._engine = open_row_engine(sampler, in_flight)
        self._groups: dict[int, _Group] = {}  # by position

    @property
    def num_groups(self) -> int:
        """Groups that are not whole yet."""
        return len(self._groups)

    @property
    def leases(self) -> set[int]:
        """Ids of the leases that they are of."""
        return {group.lease.id for group in self._groups.values()}

    def is_news(self, weights: PublishedWeights) -> bool:
        """Whether these are newer than what it was given last."""
        return self._engine.is_news(weights)

    def load(self, weights: PublishedWeights) -> None:
        """Samples with these from now on, see `Engine.load`."""
        self._engine.give(weights)

    def add(self, lease: Lease) -> None:
        """Begins the groups of a lease, or goes on with them where there is something of them."""
        environment, n = self._sampler.environment, self._n
        params, seed = self._sampler.params(explore=True), self._sampler.seed
        rows = []
        for position in range(lease.position, lease.position + lease.num_groups):
            prompts = environment.prompts(SampleRequest(position, 1, n))
            mask = prompts[columns.PROMPT_MASK][0]
            prompt = prompts[columns.PROMPT_IDS][0][mask].tolist()
            before = list(lease.partial.get(position, ())) or [_NOTHING] * n
            group = _Group(lease, prompts, before)
            self._groups[position] = group
            for i, row_id in enumerate(prompts[columns.ROW_ID].tolist()):
                if before[i].finish in ("stop", "length"):
                    group.ended[i] = before[i]
                    continue
                held = before[i].token_ids
                rows.append(
                    Row((position, i), [*prompt, *held], params, num_sampled=len(held),
                        noise=Noise(seed, row_id), group=position)
                )  # fmt: skip
        self._engine.rows.add(rows)

    def drop(self, lease: int) -> None:
        """Gives the groups of a lease up, which somebody else samples now."""
        for position in [p for p, group in self._groups.items() if group.lease.id == lease]:
            self._engine.rows.abort([(position, i) for i in range(self._n)])
            del self._groups[position]

    def step(self) -> list[tuple[Lease, JudgedBatch]]:
        """Samples a token for every row; the groups that became whole, judged.

        Raises:
            FloatingPointError: the model's logits are not finite.
        """
        for ended in self._engine.step():
            row_id: Any = ended.id
            position, i = row_id
            if ended.finish == "error":
                raise FloatingPointError(
                    "logits must be finite: the model gave NaN or infinity while sampling. "
                    "Check the weights it was given, its dtype and the learning rate."
                )
            group = self._groups[position]
            group.ended[i] = _joined(group.before[i], ended, ended.finish)
        whole = [p for p, group in self._groups.items() if len(group.ended) == self._n]
        # Where one cannot be judged all are still there, to be given back.
        judged = [(self._groups[p].lease, self._judge(self._groups[p])) for p in whole]
        for position in whole:
            del self._groups[position]
        return judged

    def partial(self) -> dict[int, dict[int, tuple[Tokens, ...]]]:
        """What there is of each group, by lease and position."""
        found: dict[int, dict[int, tuple[Tokens, ...]]] = {}
        for position, group in self._groups.items():
            running = [i for i in range(self._n) if i not in group.ended]
            read = self._engine.rows.sampled([(position, i) for i in running], [0] * len(running))
            held = dict(group.ended)
            for i, tokens in zip(running, read, strict=True):
                held[i] = _joined(group.before[i], tokens)
            rows = tuple(held[i] for i in range(self._n))
            found.setdefault(group.lease.id, {})[position] = rows
        return found

    def _judge(self, group: _Group) -> JudgedBatch:
        sampler = self._sampler
        environment, texts = sampler.environment, group.lease.return_texts
        position = int(group.prompts[columns.GROUP][0])
        # The prompts handed out last are those that the environment judges.
        prompts = environment.prompts(SampleRequest(position, 1, self._n, return_texts=texts))
        environment.env.global_step = sampler.weights.version
        made = self._columns([group.ended[i] for i in range(self._n)])
        judged = environment.judge(made)
        batch = JudgedBatch(
            columns={**made, **prompts, **judged.columns},
            rewards=judged.rewards,
            components=judged.components,
            metrics=judged.metrics,
            texts=judged.texts,
            weights=sampler.weights.metrics(),
            pad_token_id=sampler.policy.pad_token_id,
        )
        return batch.to("cpu")

    def _columns(self, rows: list[Tokens]) -> dict[str, torch.Tensor]:
        longest = max(len(row.token_ids) for row in rows)

        def padded(entries: list[tuple], filler: float, dtype: torch.dtype) -> torch.Tensor:
            wide = [[*row, *[filler] * (longest - len(row))] for row in entries]
            return torch.tensor(wide, dtype=dtype)

        versions = padded([row.versions for row in rows], NO_VERSION, torch.int32)
        pad = self._sampler.policy.pad_token_id
        made = {
            columns.COMPLETION_IDS: padded([row.token_ids for row in rows], pad, torch.int64),
            columns.COMPLETION_MASK: versions != NO_VERSION,
            columns.SAMPLER_LOGPROBS: padded([row.logprobs for row in rows], 0.0, torch.float32),
            columns.FINISHED: torch.tensor([row.finish == "stop" for row in rows]),
            columns.WEIGHTS_VERSION: versions,
        }
        if self._masks_stale_prefix:
            newest = versions.max(dim=1, keepdim=True).values
            made[columns.LOSS_MASK] = made[columns.COMPLETION_MASK] & (versions == newest)
        return made

    def close(self) -> None:
        """Frees the engine."""
        self._engine.close()


def _joined(before: Tokens, rest: Ended | Sampled, finish: str = "aborted") -> Tokens:
    """What a row came with, and what was sampled since."""
    return Tokens(
        (*before.token_ids, *rest.token_ids),
        (*before.logprobs, *rest.logprobs),
        (*before.versions, *rest.versions),
        finish,
    )
