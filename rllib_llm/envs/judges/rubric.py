"""Judge models that grade by criteria, or against a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllib_llm.envs.judges.judge_model import REASONING, Messages, SchemaJudge, tagged
from rllib_llm.envs.judges.reward_functions import Invalid, required_column

_CORRECT = "correct"


@dataclass(frozen=True)
class Criterion:
    """One thing that is graded.

    weight: of its grade; below 0: what it describes is a fault.
    """

    name: str
    description: str
    weight: float = 1.0


class RubricJudge(SchemaJudge):
    """Scores by weighted criteria: sum(weight * grade / scale) / sum(weights above 0).

    1 where each criterion is fully met and no fault is there. In `env_config`:
    `reward_functions: [{function: rllib_llm.envs.judges.rubric.RubricJudge, kwargs: {base_url:
    "http://localhost:8000/v1", model: my-judge, criteria: [{name: polite, description: The answer
    is polite., weight: 2}]}}]`. The mean grades are metrics, `grade_<criterion>`, 0 to 1.

    Args:
        base_url, model: see `JudgeModel`.
        criteria: of {name, description, weight}.
        scale: highest grade; 1 asks whether a criterion is met.
        reference_column: of the data set, shown to the judge as a good answer.
        judge: further arguments of `SchemaJudge` and `JudgeModel`.

    Raises:
        ValueError: no criterion of a weight above 0, names that repeat, a scale below 1.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        criteria: Sequence[Mapping[str, Any] | Criterion],
        scale: int = 5,
        reference_column: str | None = None,
        **judge: Any,
    ) -> None:
        self._criteria = [c if isinstance(c, Criterion) else Criterion(**c) for c in criteria]
        names = [criterion.name for criterion in self._criteria]
        self._most = sum(max(criterion.weight, 0.0) for criterion in self._criteria)
        if len({*names, REASONING}) <= len(names) or self._most <= 0 or scale < 1:
            raise ValueError(
                f"criteria={names!r}, scale={scale!r} must have names of their own other than "
                f"{REASONING!r}, one weight above 0 at least, and grades from 0 to 1 or more: the "
                "score is their weighted mean. Correct them."
            )
        grade = {"type": "integer", "minimum": 0, "maximum": scale}
        super().__init__(base_url, model, dict.fromkeys(names, grade), **judge)
        self._scale, self._reference_column = scale, reference_column

    async def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> tuple[list[float | Invalid], dict[str, list[float]]]:
        """The score of each completion, `Invalid` where the judge gave none, and the grades."""
        references = reference_column(columns, self._reference_column, len(completions))
        rows = zip(prompts, completions, references, strict=True)
        verdicts = await self.ask([self._question(*row) for row in rows], dict)
        grades = {
            f"grade_{criterion.name}": [
                float("nan") if isinstance(v, Invalid) else v[criterion.name] / self._scale
                for v in verdicts
            ]
            for criterion in self._criteria
        }
        return [v if isinstance(v, Invalid) else self._score(v) for v in verdicts], grades

    def _question(self, prompt: str, completion: str, reference: Any) -> Messages:
        listed = "\n".join(f"- {c.name}: {c.description}" for c in self._criteria)
        parts = [tagged("request", prompt), tagged("answer", completion)]
        if reference is not None:
            parts.insert(1, tagged("good_answer", str(reference)))
        task = (
            f"Grade the answer by each criterion, from 0 (not at all) to {self._scale} (fully):\n"
            f"{listed}"
        )
        return self.question([*parts, task])

    def _score(self, grades: Mapping[str, Any]) -> float:
        total = sum(c.weight * grades[c.name] for c in self._criteria)
        return total / (self._scale * self._most)


class ReferenceJudge(SchemaJudge):
    """1 where the judge finds that a completion says the same as the reference, else 0.

    Args:
        base_url, model: see `JudgeModel`.
        reference_column: of the data set, the right answers. A row of None is not judged.
        judge: further arguments of `SchemaJudge` and `JudgeModel`.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        reference_column: str = "answer",
        **judge: Any,
    ) -> None:
        super().__init__(base_url, model, {_CORRECT: {"type": "boolean"}}, **judge)
        self._reference_column = reference_column

    async def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> list[float | Invalid | None]:
        """1.0 or 0.0 for each completion, `Invalid` where the judge gave no verdict."""
        references = reference_column(columns, self._reference_column, len(completions))
        judged = [i for i, reference in enumerate(references) if reference is not None]
        questions = [self._question(prompts[i], completions[i], references[i]) for i in judged]
        scores: list[float | Invalid | None] = [None] * len(completions)
        verdicts = await self.ask(questions, lambda found: float(found[_CORRECT]))
        for i, verdict in zip(judged, verdicts, strict=True):
            scores[i] = verdict
        return scores

    def _question(self, prompt: str, completion: str, reference: Any) -> Messages:
        task = "Does the answer say the same as the right answer, whatever its form?"
        parts = [tagged("request", prompt), tagged("right_answer", str(reference))]
        return self.question([*parts, tagged("answer", completion), task])


def reference_column(columns: Mapping[str, Any], name: str | None, size: int) -> Sequence[Any]:
    """The column that a judge compares with; None for each row where it does not.

    Raises:
        ValueError: the data set has no such column.
    """
    if name is None:
        return [None] * size
    return required_column(columns, "reference_column", name)
