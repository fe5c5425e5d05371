"""What a reward function answered about a batch, read and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rllib_llm.envs.judges.reward_functions import Invalid, RewardBatch, RewardError, RewardTerm
from rllib_llm.shared.tracebacks import raised

_SHOWN = 120  # characters of a text in a message


@dataclass(frozen=True)
class RewardResult:
    """One function's answer: values (NaN: not judged by it) and validity [B], metrics, the first
    exception, and the reasons that the function gave, by row."""

    values: torch.Tensor
    valid: torch.Tensor
    metrics: dict[str, torch.Tensor]
    error: BaseException | None = None
    reasons: Mapping[int, str] = field(default_factory=dict)

    def reason(self, row: int) -> str:
        """Why the row has no score."""
        if row in self.reasons:
            return self.reasons[row]
        return "the result is NaN or infinite" if self.error is None else raised(self.error)


def failed_result(batch: RewardBatch, error: BaseException) -> RewardResult:
    """Of a function that raised on all rows."""
    device = batch.completion_ids.device
    values = torch.zeros(len(batch), device=device)
    return RewardResult(values, torch.zeros(len(batch), dtype=torch.bool, device=device), {}, error)


def join_rows(rows: Sequence[RewardResult]) -> RewardResult:
    """The answers about single rows as one about all of them."""
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    missing = torch.zeros_like(rows[0].values)
    return RewardResult(
        torch.cat([row.values for row in rows]),
        torch.cat([row.valid for row in rows]),
        {name: torch.cat([row.metrics.get(name, missing) for row in rows]) for name in names},
        next((row.error for row in rows if row.error is not None), None),
        {i: row.reason(0) for i, row in enumerate(rows) if not bool(row.valid)},
    )


def read_answer(term: RewardTerm, answer: Any, batch: RewardBatch) -> RewardResult:
    """What a function returned: scores, or (scores, metrics).

    Raises:
        RewardError: it is of the wrong length or type.
    """
    metrics: Mapping[str, Any] = {}
    reasons: dict[int, str] = {}
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
        answer, metrics = answer
    unjudged = torch.zeros(len(batch), dtype=torch.bool, device=batch.completion_ids.device)
    if isinstance(answer, Sequence) and len(answer) == len(batch):
        unjudged = torch.tensor([one is None for one in answer], device=unjudged.device)
        reasons = {i: one.reason for i, one in enumerate(answer) if isinstance(one, Invalid)}
        answer = [
            0.0 if one is None else torch.nan if isinstance(one, Invalid) else one
            for one in answer
        ]  # fmt: skip
    values = _numbers(term.name, "scores", answer, batch)
    finite = torch.isfinite(values)
    values = torch.where(finite, values, torch.zeros_like(values))
    return RewardResult(
        torch.where(unjudged, torch.full_like(values, torch.nan), values),
        finite,
        {
            str(name): _numbers(term.name, f"metric {name!r}", given, batch)
            for name, given in metrics.items()
        },
        reasons=reasons,
    )


def _numbers(function: str, what: str, answer: Any, batch: RewardBatch) -> torch.Tensor:
    """The answer as float32 [B]; raises `RewardError` naming the function where it is not."""
    size = len(batch)
    if not isinstance(answer, torch.Tensor):
        try:
            values = [float(value) for value in answer]
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"{what} of reward function {function!r} must be {size} numbers (a list or a "
                f"tensor [{size}]): it returned {type(answer).__name__} {str(answer)[:120]!r} "
                f"({error}) for a batch beginning with {shown_row(batch, 0)}. Return one number "
                "for each completion, None where it is not judged."
            ) from error
        answer = torch.tensor(values, dtype=torch.float32)
    if answer.shape != (size,):
        raise RewardError(
            f"{what} of reward function {function!r} must have shape [{size}], one number for "
            f"each completion: it has {list(answer.shape)} for a batch beginning with "
            f"{shown_row(batch, 0)}. Return {size} numbers; squeeze extra dimensions."
        )
    return answer.detach().to(device=batch.completion_ids.device, dtype=torch.float32)


def shown_row(batch: RewardBatch, i: int) -> str:
    """A row of the batch for a message."""
    if not batch.completions:
        return f"token ids {batch.completion_ids[i][batch.completion_mask[i]].tolist()[:40]}"
    return f"prompt {batch.prompts[i][-_SHOWN:]!r} completion {batch.completions[i][:_SHOWN]!r}"
