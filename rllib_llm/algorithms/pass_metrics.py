"""pass@k, pass^k and maj@k of several completions of each held-out prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from rllib_llm.numerics.pass_at_k import majority_rates, rates
from rllib_llm.rollouts.request import JudgedBatch
from rllib_llm.shared import columns
from rllib_llm.shared.errors import SettingError


def pass_metrics(
    batch: JudgedBatch, ks: Sequence[int], on: str | None, answer_pattern: str | None = None
) -> dict[str, float]:
    """`pass@<k>`, `pass^<k>` and, where there are texts, `maj@<k>` of the completions of each
    prompt, with `_low` and `_high` of their 95 % intervals over prompts. A conversation of several
    rows is one sample.

    Args:
        batch: of held-out prompts.
        ks: numbers of completions.
        on: the component that says what passed, 0 or 1; None: the score.
        answer_pattern: a regular expression, of whose last match the first group is what a
            completion votes for; None: all that it says.

    Raises:
        ValueError: what says that a completion has passed is not there, or neither 0 nor 1.
    """
    valid = batch.columns[columns.VALID] & batch.rollouts.is_first
    column = batch.columns[columns.SCORES] if on is None else batch.components.get(on)
    if column is None or not bool(((column == 0) | (column == 1))[valid & ~column.isnan()].all()):
        found = "there is none" if column is None else "it has other numbers than 0 and 1"
        raise SettingError(
            name="pass_on",
            value=on,
            rule=f"name a component of the reward that is 0 or 1, of {sorted(batch.components)}",
            reason=found,
            remedy="Name one, or None where the score itself is",
        )
    right, groups, counts = column == 1, batch.columns[columns.GROUP], valid & ~column.isnan()
    found_rates = rates(right, groups, counts, ks)
    if "completion" in batch.texts:
        answers = answers_of(batch, answer_pattern)
        found_rates |= majority_rates(answers, right, groups, counts, ks)
    metrics: dict[str, float] = {}
    for name, (mean, low, high) in found_rates.items():
        metrics |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    return metrics


def answers_of(batch: JudgedBatch, pattern: str | None) -> list[str | None]:
    """What each row's rollout votes for, white space at its ends aside; None where nothing matches.
    Of a conversation it is the assistant's last message."""
    texts = batch.texts["completion"]
    if "messages" in batch.texts:
        said = [_last_words(json.loads(messages)) for messages in batch.texts["messages"]]
        texts = [said[last] for last in batch.rollouts.lasts.tolist()]
    if pattern is None:
        return [text.strip() for text in texts]
    matches = [list(re.finditer(pattern, text, re.DOTALL)) for text in texts]
    return [found[-1].group(1 if found[-1].re.groups else 0).strip() if found else None
            for found in matches]  # fmt: skip


def _last_words(messages: list[dict]) -> str:
    said = [message for message in messages if message["role"] == "assistant"]
    return str(said[-1].get("content") or "") if said else ""
