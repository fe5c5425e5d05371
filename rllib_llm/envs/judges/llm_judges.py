"""Judge models on a server with OpenAI's interface, as reward functions.

A score in free text (`JudgeServer`), grades by criteria (`RubricJudge`), against a reference
(`ReferenceJudge`), or two answers compared (`PairwiseJudge`), asked twice with their places
swapped: judges prefer a place, the first as a rule (Zheng et al. 2023, "Judging LLM-as-a-judge",
section 3.3), so what wins in one place only is a tie.
"""

from __future__ import annotations

import contextlib
import math
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import Any

from rllib_llm.envs.judges.judge_model import (
    REASONING,
    JudgeModel,
    Messages,
    SchemaJudge,
    UnreadableReply,
    tagged,
    without_thoughts,
)
from rllib_llm.envs.judges.reward_functions import Invalid, required_column
from rllib_llm.shared.arguments import Count, checked
from rllib_llm.shared.errors import require
from rllib_llm.shared.messages import blamed_on

_NUMBER = r"[-+]?\d+(?:\.\d+)?(?![\w]|[.,]\d)"  # "7,5" is not read
# Fenced code, lines after ">", tags, and words in quotation marks, which an inch mark begins none.
_QUOTED = re.compile(
    r"```.*?(?:```|\Z)|^[ \t]*>[^\n]*|<(\w+)>.*?</\1>|“.*?”|«.*?»|"
    r'(?<![\w"])"(?=\S).*?(?<=\S)"(?!\w)', re.DOTALL | re.MULTILINE,
)

TEMPLATE = (
    "Rate how good the answer to the request is, from 0 (useless) to 10 (perfect).\n\n"
    "Request:\n{prompt}\n\nAnswer:\n{completion}"
)


@checked
class JudgeServer(JudgeModel):
    """Scores completions with the number that a chat model replies.

    In `rewards`: `functions: [{function: rllib_llm.envs.judges.llm_judges.JudgeServer,
    kwargs: {base_url: "http://localhost:8000/v1", model: my-judge}}]`.

    Args:
        base_url: of the server.
        model: the server's name for the judge.
        template: the request; {prompt}, {completion} and the data set's columns are filled in.
        system: the system message, or None.
        pattern: regular expression of the score in the reply; its last match after the judge's
            thoughts (group 1, where it has groups) is read as a number. None: the request asks for
            a line "Score: 8", and the first one counts that is no quotation.
        low, high: allowed scores; another number counts as no answer.
        judge: further arguments of `JudgeModel`: max_tokens, temperature, cache, budget, retries.
    """

    def __init__(
        self, base_url: str, model: str, *, template: str = TEMPLATE, system: str | None = None,
        pattern: str | None = None, low: float = 0.0, high: float = 10.0, **judge: Any,
    ) -> None:  # fmt: skip
        require(low < high, "low", low, f"be below high={high!r}", "they bound the scores")
        super().__init__(base_url, model, **judge)
        asked = f"\n\nEnd with a line of its own, Score: N, where N is from {low:g} to {high:g}."
        self._template, self._system = template + ("" if pattern else asked), system
        self.needed_columns = [("template", name) for name in _names_in(template)]
        with blamed_on("pattern", pattern, "be a regular expression", remedy="Correct it"):
            self._pattern = None if pattern is None else re.compile(pattern)
        self._low, self._high = low, high

    async def __call__(
        self, prompts: list[str], completions: list[str], **columns: Any
    ) -> list[float | Invalid]:
        """One score per completion, `Invalid` where the judge gave none."""
        system = {"role": "system", "content": self._system or ""}
        first = [] if self._system is None else [system]
        questions = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            row = {name: values[i] for name, values in columns.items() if name != "completion_ids"}
            text = self._template.format(**{**row, "prompt": prompt, "completion": completion})
            questions.append([*first, {"role": "user", "content": text}])
        return await self.replies(questions, self._read_score)

    def _read_score(self, reply: str) -> float:
        """The score in a reply."""
        said, pattern = without_thoughts(reply), self._pattern
        found: Any = None
        if pattern is None:
            found, rule = stated_score(said, self._high), "name one score"
        else:
            rule = f"hold a number where pattern={pattern.pattern!r} looks, one"
            for match in pattern.finditer(said):
                found = match[1 if pattern.groups else 0]
        with contextlib.suppress(TypeError, ValueError):  # none, or more than a number
            if self._low <= (score := float(found)) <= self._high:
                return score
        rule = f"{rule} from {self._low:g} to {self._high:g}"
        raise UnreadableReply(f"the judge's reply={reply[:200]!r} must {rule}.")


def _names_in(template: str) -> list[str]:
    """The columns that a template names; raises Problems where it cannot be read."""
    with blamed_on("template", template, "name columns in braces", remedy="Write { as {{"):
        fields = [field for _, field, _, _ in string.Formatter().parse(template)]
    names = [re.split(r"[.[]", field)[0] for field in fields if field is not None]
    return [name for name in names if name not in ("prompt", "completion")]


def stated_score(said: str, high: float) -> float | None:
    """The score of a reply: the number that it is, else the one of its first line that begins with
    "Score:" and is no quotation; None where there is none, or a range or another scale follows."""
    around, most = r"[ \t*_`]*", re.escape(f"{high:.15g}")
    scale = rf"(?:{around}(?:/|out of|of){around}{most}(?:\.0+)?(?![\d.]*\d))?"
    number = rf"{around}({_NUMBER}){scale}{around}"
    if match := re.fullmatch(rf"{number}\.?", said.strip()):
        return float(match[1])
    mark = (r"^[ \t*_`#-]*(?:(?:final|overall|total)[ \t]+)?"
            r"(?:score|rating|grade|verdict)[ \t*_`]*[:=]")  # fmt: skip
    _, *marked = re.split(mark, _QUOTED.sub('"', said), maxsplit=1, flags=re.I | re.M)
    more = r"(?:$|[.;!(](?!\d)|[,–—-](?!\s*\d)|\b(?:because|since|as|for)\b)"
    match = re.match(number + more, marked[0], re.M) if marked else None
    return float(match[1]) if match else None


_CORRECT = "correct"


@dataclass(frozen=True)
class Criterion:
    """One thing that is graded.

    weight: of its grade; below 0: what it describes is a fault.
    """

    name: str
    description: str
    weight: float = 1.0


@checked
class RubricJudge(SchemaJudge):
    """Scores by weighted criteria: sum(weight * grade / scale) / sum(weights above 0).

    1 where each criterion is fully met and no fault is there. In `rewards`:
    `functions: [{function: rllib_llm.envs.judges.llm_judges.RubricJudge, kwargs: {base_url:
    "http://localhost:8000/v1", model: my-judge, criteria: [{name: polite, description: The answer
    is polite., weight: 2}]}}]`. The mean grades are metrics, `grade_<criterion>`, 0 to 1.

    Args:
        base_url, model: see `JudgeModel`.
        criteria: of {name, description, weight}.
        scale: highest grade; 1 asks whether a criterion is met.
        reference_column: of the data set, shown to the judge as a good answer.
        judge: further arguments of `SchemaJudge` and `JudgeModel`.

    Raises:
        Problems: no criterion of a weight above 0, names that repeat.
    """

    def __init__(
        self, base_url: str, model: str, *, criteria: Sequence[Mapping[str, Any] | Criterion],
        scale: Count = 5, reference_column: str | None = None, **judge: Any,
    ) -> None:  # fmt: skip
        with blamed_on("criteria", criteria, "be of {name, description, weight}", remedy=""):
            self._criteria = [c if isinstance(c, Criterion) else Criterion(**c) for c in criteria]
            names = [criterion.name for criterion in self._criteria]
            self._most = sum(max(criterion.weight, 0.0) for criterion in self._criteria)
        require(len({*names, REASONING}) > len(names) and self._most > 0, "criteria", names,
                f"have names of their own, not {REASONING!r}, and one weight above 0 at least",
                "the score is their weighted mean")  # fmt: skip
        grade = {"type": "integer", "minimum": 0, "maximum": scale}
        super().__init__(base_url, model, dict.fromkeys(names, grade), **judge)
        self._scale, self._reference_column = scale, reference_column
        if reference_column is not None:
            self.needed_columns = [("reference_column", reference_column)]

    async def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> tuple[list[float | Invalid], dict[str, list[float]]]:
        """The score of each completion, `Invalid` where the judge gave none, and the grades."""
        references: Sequence[Any] = [None] * len(completions)
        if self._reference_column is not None:
            references = required_column(columns, "reference_column", self._reference_column)
        scale = f"from 0 (not at all) to {self._scale} (fully)"
        listed = "\n".join(f"- {c.name}: {c.description}" for c in self._criteria)
        questions = []
        for prompt, text, reference in zip(prompts, completions, references, strict=True):
            shown = [] if reference is None else [tagged("good_answer", str(reference))]
            questions.append(self.question([
                tagged("request", prompt), *shown, tagged("answer", text),
                f"Grade the answer by each criterion, {scale}:\n{listed}",
            ]))  # fmt: skip
        verdicts = await self.ask(questions, dict)
        grades = {}
        for name in (criterion.name for criterion in self._criteria):
            grades[f"grade_{name}"] = [
                math.nan if isinstance(v, Invalid) else v[name] / self._scale for v in verdicts
            ]
        most, criteria = self._scale * self._most, self._criteria
        return [
            v if isinstance(v, Invalid) else sum(c.weight * v[c.name] for c in criteria) / most
            for v in verdicts
        ], grades


@checked
class ReferenceJudge(SchemaJudge):
    """1 if the judge finds that the completion agrees with the reference, else 0.

    Args:
        base_url, model: see `JudgeModel`.
        reference_column: of the data set, the right answers. A row of None is not judged.
        judge: further arguments of `SchemaJudge` and `JudgeModel`.
    """

    def __init__(
        self, base_url: str, model: str, *, reference_column: str = "answer", **judge: Any
    ) -> None:
        super().__init__(base_url, model, {_CORRECT: {"type": "boolean"}}, **judge)
        self._reference_column = reference_column
        self.needed_columns = [("reference_column", reference_column)]

    async def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> list[float | Invalid | None]:
        """1.0 or 0.0 for each completion, `Invalid` where the judge gave no verdict."""
        references = required_column(columns, "reference_column", self._reference_column)
        rows = zip(prompts, completions, references, strict=True)
        task = "Does the answer say the same as the right answer, whatever its form?"
        questions = [
            self.question([
                tagged("request", prompt), tagged("right_answer", str(reference)),
                tagged("answer", text), task,
            ])
            for prompt, text, reference in rows if reference is not None
        ]  # fmt: skip
        verdicts = iter(await self.ask(questions, lambda found: float(found[_CORRECT])))
        return [None if reference is None else next(verdicts) for reference in references]


GROUP = "group"
_BETTER = "better"
_TASK = (
    "Which answer to the request is better? Say A, B, or tie where neither is. Their order and "
    "their length mean nothing."
)
_POINTS = MappingProxyType({"A": 1.0, "B": 0.0, "tie": 0.5})  # of the answer that is shown as A
Pair = tuple[str, str, str]
"""(prompt, the answer that gets the points, the other one)"""


@checked
class PairwiseJudge(SchemaJudge):
    """Share of comparisons that a completion wins, ties counting half: 0 to 1.

    In `rewards`: `functions: [{function: rllib_llm.envs.judges.llm_judges.PairwiseJudge,
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
        self, base_url: str, model: str, *, against: str = GROUP,
        num_opponents: Count | None = None, **judge: Any,
    ) -> None:  # fmt: skip
        winner = {"type": "string", "enum": list(_POINTS)}
        super().__init__(base_url, model, {_BETTER: winner}, **judge)
        self._against, self._num_opponents = against, num_opponents
        if against != GROUP:
            self.needed_columns = [("against", against)]

    async def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> tuple[list[float | Invalid], dict[str, list[float]]]:
        """The score of each completion, `Invalid` where no comparison came about."""
        if self._against == GROUP:
            grouped = _met_in_groups(prompts, self._num_opponents)
            pairs = [(prompts[i], completions[i], completions[j]) for i, j in grouped]
            met: list[tuple[int, int | None]] = [*grouped]
        else:
            others = required_column(columns, "against", self._against)
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
        scores = [fmean(points) if points else why[i] for i, points in enumerate(won)]
        return scores, {"places_disagree": [fmean(row) if row else math.nan for row in changed]}

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
