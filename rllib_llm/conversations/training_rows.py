"""What a conversation is made of, and what is learnt from it.

Nodes know the one before them; each path of them is a row of tokens, and rows are columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

import torch

from rllib_llm.shared import columns
from rllib_llm.shared.columns import NO_VERSION
from rllib_llm.shared.padding import pad_left, pad_right


@dataclass
class Node:
    """What one append added.

    parent: index of the node before it; None: it begins a path. messages: what it says, as chat
    templates take it; a node that begins a later path repeats what was said before. token_ids:
    those that it adds. Of a sampled one: `logprobs` and weight `versions` of each token, `finish`,
    and the `reward` that it earned.
    """

    parent: int | None
    messages: tuple[Mapping[str, Any], ...]
    token_ids: tuple[int, ...]
    sampled: bool = False
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish: str = ""
    reward: float = 0.0

    @property
    def role(self) -> str:
        """Of its last message."""
        return str(self.messages[-1]["role"]) if self.messages else ""

    @property
    def version_spans(self) -> list[tuple[int, int]]:
        """(version of the weights, tokens in a row that they sampled)."""
        return [(version, len(list(run))) for version, run in groupby(self.versions)]


def path_to(nodes: Sequence[Node], leaf: int | None) -> list[Node]:
    """The nodes from the first to `leaf`; none where it is None."""
    place, path = leaf, []
    while place is not None:
        path.append(nodes[place])
        place = nodes[place].parent
    return path[::-1]


@dataclass
class TrainingRow:
    """One path, cut behind its last sampled token; all lists of tokens but the prompt are [T].

    messages: all that was said on the path. num_prompt_messages: of them those that the prompt's
    tokens hold.
    """

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    finished: bool = False
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    num_prompt_messages: int = 0

    @property
    def num_sampled(self) -> int:
        """Tokens that are learnt from."""
        return sum(self.loss_mask)

    def cut(self) -> TrainingRow:
        """The row up to its last token that is learnt from."""
        end = len(self.loss_mask) - self.loss_mask[::-1].index(True) if self.num_sampled else 0
        return replace(
            self, completion_ids=self.completion_ids[:end], loss_mask=self.loss_mask[:end],
            logprobs=self.logprobs[:end], versions=self.versions[:end], rewards=self.rewards[:end],
        )  # fmt: skip


def rows_of(nodes: Sequence[Node]) -> list[TrainingRow]:
    """One row per path; each sampled token is learnt from in the first that holds it."""
    learnt: set[int] = set()
    parents = {node.parent for node in nodes}
    paths = (path_to(nodes, leaf) for leaf in range(len(nodes)) if leaf not in parents)
    return [row for path in paths if (row := _row(path, learnt)).num_sampled]


def _row(path: Sequence[Node], learnt: set[int]) -> TrainingRow:
    """The row of a path. `learnt`: ids of nodes that other rows learn from, to which its own are
    added."""
    row = TrainingRow([])
    for node in path:
        row.messages.extend(node.messages)
        if not node.sampled and not row.completion_ids:
            row.prompt_ids.extend(node.token_ids)
            row.num_prompt_messages = len(row.messages)
            continue
        count = len(node.token_ids)
        is_new = node.sampled and id(node) not in learnt
        row.completion_ids.extend(node.token_ids)
        row.loss_mask.extend([is_new] * count)
        row.logprobs.extend(node.logprobs if is_new else [0.0] * count)
        row.versions.extend(node.versions if is_new else [NO_VERSION] * count)
        row.rewards.extend([0.0] * count)
        if is_new:
            learnt.add(id(node))
            row.rewards[-1] = node.reward
            row.finished = node.finish == "stop"
    return row.cut()


class Learnable(Protocol):
    """What training reads of a conversation."""

    @property
    def token_ids(self) -> list[int]:
        """All tokens of its newest path."""

    def rows(self) -> list[TrainingRow]:
        """A row for each path on which something was sampled."""


@dataclass(frozen=True)
class Rollout:
    """A finished conversation and its result.

    score: all that it earned. valid: False where something failed that is not the policy's doing,
    for `reason`. group: position of its prompt; row_id: its place among all rollouts; prompt_index:
    its row in the data set.
    """

    conversation: Learnable
    score: float
    valid: bool
    reason: str
    group: int
    row_id: int
    prompt_index: int


def training_columns(rollouts: Sequence[Rollout], pad_token_id: int) -> dict[str, torch.Tensor]:
    """The columns of all rows of these rollouts, one after the other.

    A rollout from which nothing can be learnt has one row all the same, which is not valid: its
    group has lost a member, and that is seen.
    """
    rows: list[TrainingRow] = []
    owners: list[Rollout] = []
    weights: list[float] = []
    for rollout in rollouts:
        own = rollout.conversation.rows()
        total = sum(row.num_sampled for row in own)
        for row in own or [_nothing(rollout.conversation, pad_token_id)]:
            rows.append(row)
            owners.append(rollout)
            weights.append(row.num_sampled / total if total else 1.0)

    def right(name: str, filler: float, dtype: torch.dtype) -> torch.Tensor:
        return pad_right([getattr(row, name) for row in rows], filler, dtype)[0]

    prompt_ids, prompt_mask = pad_left([row.prompt_ids for row in rows], pad_token_id)
    completion_ids, completion_mask = pad_right([row.completion_ids for row in rows], pad_token_id)
    has_tokens = torch.tensor([row.num_sampled > 0 for row in rows])
    valid = torch.tensor([owner.valid for owner in owners]) & has_tokens
    return {
        columns.PROMPT_IDS: prompt_ids,
        columns.PROMPT_MASK: prompt_mask,
        columns.COMPLETION_IDS: completion_ids,
        columns.COMPLETION_MASK: completion_mask,
        columns.LOSS_MASK: right("loss_mask", False, torch.bool),
        columns.SAMPLER_LOGPROBS: right("logprobs", 0.0, torch.float32),
        columns.WEIGHTS_VERSION: right("versions", NO_VERSION, torch.int32),
        columns.REWARDS: right("rewards", 0.0, torch.float32),
        columns.SCORES: torch.tensor([owner.score for owner in owners], dtype=torch.float32),
        columns.VALID: valid,
        columns.FINISHED: torch.tensor([row.finished for row in rows]),
        columns.ROW_WEIGHT: torch.tensor(weights, dtype=torch.float32),
        columns.GROUP: torch.tensor([owner.group for owner in owners]),
        columns.ROW_ID: torch.tensor([owner.row_id for owner in owners]),
        columns.PROMPT_INDEX: torch.tensor([owner.prompt_index for owner in owners]),
    }


def _nothing(conversation: Learnable, pad_token_id: int) -> TrainingRow:
    """A row without a token that is learnt from."""
    prompt = conversation.token_ids or [pad_token_id]
    return TrainingRow(prompt, [pad_token_id], [False], [0.0], [NO_VERSION], [0.0])
