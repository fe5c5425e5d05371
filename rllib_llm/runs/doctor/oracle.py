"""What reward functions make of the right answers and of others' answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from rllib_llm.envs.judges.reward_functions import RewardBatch, RewardTerm
from rllib_llm.runs.doctor.reward_rules import ANSWERS
from rllib_llm.runs.doctor.stage import Stage, first_rows

NUM_ROWS = 32


def answer_scores(stage: Stage) -> tuple[float, float] | None:
    """Mean weighted reward of rows with their own answer, and with the next row's; None where the
    prompts have no answers, or nothing but a model judges."""
    from rllib_llm.envs.prompts import PromptSource

    rows = first_rows(stage.env.get("prompts"), "prompts")
    given = stage.env.get("reward_functions")
    if rows is None or not given or stage.is_conversation:
        return None
    column = next((name for name in ANSWERS if name in rows.columns), None)
    if column is None:
        return None
    source = PromptSource(rows, prompt_column=stage.env.get("prompt_column"), shuffle=False)
    chosen = [source.row(index) for index in range(min(NUM_ROWS, len(source)))]
    answers = [str(row.columns[column]) for row in chosen]
    ids = torch.ones(len(chosen), 1, dtype=torch.long)
    names = {name for row in chosen for name in row.columns}
    batch = RewardBatch(
        prompt_ids=ids,
        prompt_mask=ids.bool(),
        completion_ids=ids,
        completion_mask=ids.bool(),
        prompts=[str(row.prompt) for row in chosen],
        completions=answers,
        columns={name: [row.columns.get(name) for row in chosen] for name in names},
    )
    terms = [RewardTerm.from_spec(spec) for spec in (given if isinstance(given, list) else [given])]
    terms = [term for term in terms if not term.is_async and not term.wants_tokens]
    if not terms:
        return None
    others = [*answers[1:], answers[0]]
    return (
        _mean(terms, batch),
        _mean(terms, dataclasses.replace(batch, completions=others)),
    )


def _mean(terms: Sequence[RewardTerm], batch: RewardBatch) -> float:
    total = 0.0
    for term in terms:
        result = term.call(batch)
        values = result[0] if isinstance(result, tuple) else result
        known = [float(v) for v in values if v is not None and math.isfinite(float(v))]
        total += term.weight * sum(known) / max(1, len(known))
    return total
