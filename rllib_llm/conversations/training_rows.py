"""What is learnt from a conversation: a row of tokens for each of its paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rllib_llm.conversations.nodes import NO_VERSION, Node, path_to


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
