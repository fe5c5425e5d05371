"""Training columns of conversations: one row per path, padded to one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rllib_llm.conversations.conversation import Conversation
from rllib_llm.conversations.nodes import NO_VERSION
from rllib_llm.conversations.training_rows import TrainingRow
from rllib_llm.shared import columns
from rllib_llm.shared.padding import pad_left, pad_right


@dataclass(frozen=True)
class Rollout:
    """A conversation that is over, and what is said of it.

    score: all that it earned. valid: False where something failed that is not the policy's doing,
    for `reason`. group: position of its prompt; row_id: its place among all rollouts; prompt_index:
    its row in the data set.
    """

    conversation: Conversation
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


def _nothing(conversation: Conversation, pad_token_id: int) -> TrainingRow:
    """A row without a token that is learnt from."""
    prompt = conversation.token_ids or [pad_token_id]
    return TrainingRow(prompt, [pad_token_id], [False], [0.0], [NO_VERSION], [0.0])
