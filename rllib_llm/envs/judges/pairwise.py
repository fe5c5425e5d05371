"""A judge model that compares two answers, asked twice with their places swapped.

Judges prefer a place, the first as a rule (Zheng et al. 2023, "Judging LLM-as-a-judge", section
3.3): what wins in one place only is a tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from rllib_llm.envs.judges.judge_model import Messages, SchemaJudge, tagged
from rllib_llm.envs.judges.reward_functions import Invalid
from rllib_llm.envs.judges.rubric import reference_column

GROUP = "group"
_BETTER = "better"
_TASK = (
    "Which answer to the request is better? Say A, B, or tie where neither is. Their order and "
    "their length mean nothing."
)
_POINTS = MappingProxyType({"A": 1.0, "B": 0.0, "tie": 0.5})  # of the answer that is shown as A
Pair = tuple[str, str, str]
"""(prompt, the answer that gets the points, the other one)"""


class PairwiseJudge(SchemaJudge):
    """Share of comparisons that a completion wins, ties counting half: 0 to 1.

    In `env_config`: `reward_functions: [{function: rllib_llm.envs.judges.pairwise.PairwiseJudge,
    kwargs: {base_url: "http://localhost:8000/v1", model: my-judge, against: group}}]`. The metric
    `places_disagree` is the share of a completion's comparisons whose winner changed with its
    place.

    Args:
        base_url, model: see `JudgeModel`.
        against: "group", the other completions of the prompt, or a column of the data set.
        num_opponents: of the group, the next ones; None: all.
        judge: further arguments of `SchemaJudge` and `JudgeModel`.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        against: str = GROUP,
        num_opponents: int | None = None,
        **judge: Any,
    ) -> None:
        if num_opponents is not None and num_opponents < 1:
            raise ValueError(
                f"num_opponents={num_opponents!r} must be at least 1, or None for all: a "
                "completion's score is how many it beats. Raise it."
            )
        winner = {"type": "string", "enum": list(_POINTS)}
        super().__init__(base_url, model, {_BETTER: winner}, **judge)
        self._against, self._num_opponents = against, num_opponents

    async def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> tuple[list[float | Invalid], dict[str, list[float]]]:
        """The score of each completion, `Invalid` where no comparison came about."""
        if self._against == GROUP:
            grouped = _met_in_groups(prompts, self._num_opponents)
            pairs = [(prompts[i], completions[i], completions[j]) for i, j in grouped]
            met: list[tuple[int, int | None]] = [*grouped]
        else:
            others = reference_column(columns, self._against, len(completions))
            met = [(i, None) for i in range(len(completions))]
            rows = zip(prompts, completions, others, strict=True)
            pairs = [(prompt, one, str(other)) for prompt, one, other in rows]
        results = await self._compare(pairs)
        won: list[list[float]] = [[] for _ in completions]
        changed: list[list[float]] = [[] for _ in completions]
        reason = Invalid("there is no other completion of its prompt to compare it with")
        why = [reason] * len(completions)
        for (i, j), result in zip(met, results, strict=True):
            for row, is_first in ((i, True), (j, False)):
                if row is None:
                    continue
                if isinstance(result, Invalid):
                    why[row] = result
                    continue
                won[row].append(result[0] if is_first else 1.0 - result[0])
                changed[row].append(float(result[1]))
        scores = [_mean(points) if points else why[i] for i, points in enumerate(won)]
        return scores, {"places_disagree": [_mean(row) if row else float("nan") for row in changed]}

    async def _compare(self, pairs: Sequence[Pair]) -> list[tuple[float, bool] | Invalid]:
        """(points of the first, whether the places decided) of each pair; equal texts are a tie."""
        unlike = [pair for pair in pairs if pair[1] != pair[2]]
        swapped = [(prompt, second, first) for prompt, first, second in unlike]
        verdicts = await self.ask(
            [self._question(*pair) for pair in (*unlike, *swapped)],
            lambda found: _POINTS[found[_BETTER]],
        )
        found: dict[Pair, tuple[float, bool] | Invalid] = {}
        halves = zip(unlike, verdicts[: len(unlike)], verdicts[len(unlike) :], strict=True)
        for pair, as_a, as_b in halves:
            if isinstance(as_a, Invalid):
                found[pair] = as_a
            elif isinstance(as_b, Invalid):
                found[pair] = as_b
            else:
                found[pair] = ((as_a + 1.0 - as_b) / 2, as_a == as_b != 0.5)
        return [found.get(pair, (0.5, False)) for pair in pairs]

    def _question(self, prompt: str, first: str, second: str) -> Messages:
        parts = [tagged("request", prompt), tagged("A", first), tagged("B", second), _TASK]
        return self.question(parts)


def _met_in_groups(prompts: Sequence[str], num_opponents: int | None) -> list[tuple[int, int]]:
    """Rows of the same prompt that meet, each pair once: every row and the next ones, in a ring."""
    groups: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)
    met: dict[frozenset[int], tuple[int, int]] = {}
    for rows in groups.values():
        reach = min(num_opponents or len(rows), len(rows) - 1)
        for place, row in enumerate(rows):
            for step in range(1, reach + 1):
                other = rows[(place + step) % len(rows)]
                met.setdefault(frozenset((row, other)), (row, other))
    return list(met.values())


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
