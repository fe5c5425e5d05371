"""Rules about reward functions: called on four rows, with time and spread."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rllib_llm.data.encoding import content_text
from rllib_llm.envs.judges.reward_functions import RewardBatch, RewardTerm
from rllib_llm.envs.judges.rewards import NOT_FINITE, RewardResult, read_answer
from rllib_llm.runs.doctor.machine_rules import server_rules
from rllib_llm.runs.doctor.stage import Stage
from rllib_llm.shared.dotted import as_list
from rllib_llm.shared.errors import Problem, problems_of, warning
from rllib_llm.shared.messages import raised

if TYPE_CHECKING:
    from rllib_llm.envs.prompts import PromptRow

NUM_ROWS = 4
SLOW_SECONDS = 30.0  # of all reward functions in one iteration
ANSWERS = ("answer", "solution", "completion", "target", "ground_truth", "reference_answer")


def reward_rules(stage: Stage) -> Iterator[Problem]:
    """Problems of a stage's reward functions; judges that need weights are left to --deep."""
    given = stage.env.get("reward_functions")
    rows = stage.prompts
    if not given or rows is None or stage.is_conversation or any(server_rules(stage)):
        return
    # The first four prompts with four kinds of completions: the row's own answer if it has one, the
    # same once more, the prompt itself, and the empty text.
    chosen = _prompts(stage, rows, NUM_ROWS)
    batch = _batch(chosen, [_answer(row.columns) for row in chosen])
    answer = batch.completions[0]
    completions = [answer or "Yes.", answer or "42", batch.prompts[2], ""]
    batch = dataclasses.replace(batch, completions=completions)
    seconds = 0.0
    for spec in as_list(given):
        try:
            term = RewardTerm.from_spec(spec)
            term.check_columns(batch.columns)
        except ValueError as error:
            yield from problems_of(error)
            continue
        if term.is_async:
            continue  # a server's; its answers are waited for together
        start = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer = term.call(batch)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (user code; told in its place)
            remedy = "Look at the function, at columns of the prompts, and at empty completions"
            if not all(isinstance(row.prompt, str) for row in chosen):
                remedy = ("Prompts are chats, and so each completion is a list of messages: use "
                          "completion[0]['content'], or add a parameter `messages` to get texts")
            yield Problem(f"reward {term.name!r}", "judge any completion", raised(error), remedy)
            continue
        seconds += time.perf_counter() - start
        try:
            yield from _look(term, read_answer(term, answer, batch), batch)
        except ValueError as error:
            yield from problems_of(error)
    num = stage.num_prompts * stage.config.num_completions / max(1, stage.num_samplers)
    expected = seconds / NUM_ROWS * num
    if expected > SLOW_SECONDS:
        yield warning(
            "reward_functions", f"take less than {SLOW_SECONDS:.0f} s of an iteration",
            f"{NUM_ROWS} completions took {seconds:.2f} s, so the {num:.0f} of each sampler take "
            f"{expected:.0f}", "Make them async, call a server, or use more samplers",
        )


def _prompts(stage: Stage, rows: Any, num: int) -> list[PromptRow]:
    """The first prompts, from the beginning again where there are fewer."""
    from rllib_llm.envs.prompts import PromptSource

    source = PromptSource(rows, prompt_column=stage.env.get("prompt_column"), shuffle=False)
    return [source.row(index % len(source)) for index in range(num)]


def _batch(rows: Sequence[PromptRow], completions: Sequence[str]) -> RewardBatch:
    """These prompts and completions, each of one token."""
    ids = torch.arange(1, len(rows) + 1).view(-1, 1)
    names = {name for row in rows for name in row.columns}
    return RewardBatch(
        prompt_ids=ids,
        prompt_mask=torch.ones_like(ids, dtype=torch.bool),
        completion_ids=ids,
        completion_mask=torch.ones_like(ids, dtype=torch.bool),
        prompts=[row.prompt if isinstance(row.prompt, str) else content_text(row.prompt[-1])
                 for row in rows],
        completions=completions,
        columns={name: [row.columns.get(name) for row in rows] for name in names},
    )  # fmt: skip


def _answer(columns: Mapping[str, Any]) -> str:
    return next((str(columns[name]) for name in ANSWERS if columns.get(name) is not None), "")


def _look(term: RewardTerm, result: RewardResult, batch: RewardBatch) -> Iterator[Problem]:
    texts = [text[:20] for text in batch.completions]
    known = result.values[result.valid & result.values.isfinite()].tolist()
    invalid = (~result.valid).nonzero().flatten().tolist()
    unfit = [texts[i] for i in invalid if result.reasons[i] == NOT_FINITE]
    if unfit or not known:
        found = f"that of {unfit} is NaN or infinite"
        if not unfit:
            told = [f"{texts[i]!r} is not judged: {result.reasons[i]}" for i in invalid[:1]]
            found = told[0] if told else f"that of each of {texts} is None"
        yield warning(f"reward {term.name!r}", "be a finite number",
                      f"{found}, and such a completion is not learnt from",
                      "Return one")  # fmt: skip
        return
    # Equal zeros may mean that a keyword is in none of the texts, unless the row's own answer is
    # among them.
    has_answer = bool(_answer({name: column[0] for name, column in batch.columns.items()}))
    is_constant = max(known) == min(known) and (known[0] != 0 or has_answer)
    if is_constant and not term.wants_tokens:
        yield warning(f"reward {term.name!r}", "differ",
                      f"it is {known[0]:g} for each of {texts}, and equal " "rewards teach nothing",
                      "Try it on texts as your model writes them")  # fmt: skip


NUM_ANSWERS = 32


def answer_scores(stage: Stage) -> tuple[float, float] | None:
    """Mean weighted reward of rows with their own answer, and with the next row's; None where the
    prompts have no answers, or nothing but a model judges."""
    rows = stage.prompts
    given = stage.env.get("reward_functions")
    if rows is None or not given or stage.is_conversation:
        return None
    column = next((name for name in ANSWERS if name in rows.columns), None)
    if column is None:
        return None
    chosen = _prompts(stage, rows, min(NUM_ANSWERS, len(rows)))
    answers = [str(row.columns[column]) for row in chosen]
    batch = _batch(chosen, answers)
    terms = [RewardTerm.from_spec(spec) for spec in as_list(given)]
    terms = [term for term in terms if not term.is_async and not term.wants_tokens]
    if not terms:
        return None
    others = [*answers[1:], answers[0]]
    return _mean(terms, batch), _mean(terms, dataclasses.replace(batch, completions=others))


def _mean(terms: Sequence[RewardTerm], batch: RewardBatch) -> float:
    total = 0.0
    for term in terms:
        result = read_answer(term, term.call(batch), batch)
        known = result.values[result.valid & result.values.isfinite()]
        total += term.weight * float(known.sum()) / max(1, len(known))
    return total
