"""The weighted sum of reward functions over a batch of completions."""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import math
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from rllib_llm.envs.judges.reward_functions import (
    Invalid,
    RewardBatch,
    RewardError,
    RewardTerm,
    as_number,
    check_names,
    question,
)
from rllib_llm.shared.columns import REWARD_PART, REWARD_WEIGHT
from rllib_llm.shared.dotted import named_entries
from rllib_llm.shared.errors import Problem, called, ended, report, require, warning
from rllib_llm.shared.remote import EventLoop, ExitedError, Late, no_answer, within

__all__ = [
    "Invalid", "RewardBatch", "RewardError", "RewardSum", "RewardTerm", "Rewards", "UnjudgedError",
]  # fmt: skip


class UnjudgedError(RewardError):
    """No row of a batch could be judged; `judge` is what failed on all of them."""

    def __init__(self, found: Any, judge: str):
        super().__init__(found)
        self.judge = judge

    def __reduce__(self) -> Any:
        return type(self), (self.found, self.judge)


@dataclass(frozen=True)
class Rewards:
    """Scores of B completions, all tensors [B] on one device.

    scores float32 (the weighted sum, 0 where not valid), valid bool, components float32 by function
    name before weighting (0 where that function failed, NaN where it does not judge the row),
    metrics float32 by name (diagnostics of the functions that are no reward; 0 where that function
    failed), failed bool by function name. reasons: for each row why it is not valid, or "".
    """

    scores: torch.Tensor
    valid: torch.Tensor
    components: dict[str, torch.Tensor]
    metrics: dict[str, torch.Tensor]
    failed: dict[str, torch.Tensor]
    reasons: tuple[str, ...] = ()


class RewardSum:
    """The weighted sum of several reward functions, each one's failures costing only its rows.

    A function that raises on the batch is called again row by row; rows on which it still raises,
    and rows it gives NaN, infinity or `Invalid`, are not valid: they are counted in `num_failed`,
    and the first of each function is shown in a warning. A row to which it gives None is not judged
    by it: the others decide, and a row that none judges is not valid. Coroutine functions run
    concurrently. Several threads may call at once: other functions are called by one at a time.

    Raises:
        RewardError: at construction for a wrong setting; when called for an answer of the wrong
            length or type.
        UnjudgedError: a function fails on every row of the batch.
    """

    def __init__(self, functions: Sequence[Any] | Any) -> None:
        self.terms: list[RewardTerm] = []
        for place, given in named_entries(functions, "reward_functions"):
            with called("reward_functions", place):
                is_term = isinstance(given, RewardTerm)
                self.terms.append(given if is_term else RewardTerm.from_spec(given))
        check_names([term.name for term in self.terms], functions)
        self.num_failed = dict.fromkeys((term.name for term in self.terms), 0)
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    @property
    def wants_texts(self) -> bool:
        """True if any function needs texts, so that the batch must be decoded."""
        return not all(term.wants_tokens for term in self.terms)

    def parts(self, components: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The training columns of the score's components [B], which are not weighted, and of their
        weights; a component of no function weighs 1."""
        weights = {term.name: term.weight for term in self.terms}
        found = {f"{REWARD_PART}{name}": part for name, part in components.items()}
        for name, part in components.items():
            found[f"{REWARD_WEIGHT}{name}"] = torch.full_like(part, weights.get(name, 1.0))
        return found

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises `RewardError` where the data set's columns do not suit every function."""
        for term in self.terms:
            term.check_columns(columns)

    def __call__(self, batch: RewardBatch) -> Rewards:
        """Scores of the batch, on the device of `batch.completion_ids`.

        What a function object reports by a `metrics()` method, one number each for all rows (the
        drift of a quantised model), is among the metrics under "<function>/<metric>".
        """
        # Async functions wait together in the background while the others compute.
        waiting = {t.name: _Pending(t, batch) for t in self.terms if t.is_async}
        with self._lock:
            results = {t.name: _judged(_Pending(t, batch)) for t in self.terms if not t.is_async}
        results.update({name: _judged(answer) for name, answer in waiting.items()})
        device = batch.completion_ids.device
        scores = torch.zeros(len(batch), device=device)
        valid = torch.ones(len(batch), dtype=torch.bool, device=device)
        judged = torch.zeros_like(valid)
        components, metrics, failed = {}, {}, {}
        reasons = ["none of the functions judges it"] * len(batch)
        for term in self.terms:
            result = results[term.name]
            with self._lock:
                self._report(term, result, batch)
            components[term.name] = result.values
            failed[term.name] = ~result.valid
            scores = scores + term.weight * result.values.nan_to_num()
            valid = valid & result.valid
            judged = judged | ~result.values.isnan()
            for row in (~result.valid).nonzero().flatten().tolist():
                reasons[row] = f"{term.name}: {result.reasons[row]}"
            for name, values in result.metrics.items():
                require(name not in metrics, "metric", name, "come from one reward function",
                        kind=RewardError)  # fmt: skip
                metrics[name] = values
            for name, value in term.metrics().items():
                metrics[name] = torch.full_like(scores, value)
        overflows = judged & ~scores.isfinite()
        valid = valid & judged & ~overflows
        scores = torch.where(valid, scores, torch.zeros_like(scores))
        flags = zip(*torch.stack((valid, overflows)).tolist(), reasons, strict=True)
        why = tuple(
            "" if ok else "the weighted sum is NaN or infinite" if is_over else reason
            for ok, is_over, reason in flags
        )
        return Rewards(scores, valid, components, metrics, failed, why)

    def _report(self, term: RewardTerm, result: RewardResult, batch: RewardBatch) -> None:
        failed = (~result.valid).nonzero().flatten().tolist()
        if not failed:
            return
        self.num_failed[term.name] += len(failed)
        reason = ended(result.reasons[failed[0]])
        shown = shown_row(batch, failed[0])
        if len(failed) == len(batch):
            found = Problem(
                f"reward function {term.name!r}", "judge at least one completion of a batch",
                f"{reason} It failed on all {len(batch)}, first on {shown}",
            )  # fmt: skip
            raise UnjudgedError([found], judge=term.name) from result.error
        if term.name not in self._warned:
            self._warned.add(term.name)
            warnings.warn(
                f"reward function {term.name!r} failed on completions, which are left out: "
                f"{reason} First on {shown}. Their share is env/{term.name}_failed.", stacklevel=3,
            )  # fmt: skip


class _Pending:
    """A function's answer about a batch; that of a coroutine function is under way."""

    def __init__(self, term: RewardTerm, batch: RewardBatch) -> None:
        self.term, self.batch, self.until = term, batch, math.inf
        self._awaited: Future[Any] | None = None
        if term.is_async:
            if term.timeout_s is not None:
                self.until = time.monotonic() + 2 * term.timeout_s + _LOOP_SECONDS
            self._awaited = _loop().submit(_in_time(term, lambda: term.call(batch)))

    def wait(self) -> Any:
        """The answer, or what the function raised.

        Raises:
            Late: it did not come within `timeout_s`. A coroutine function that blocks its event
                loop is left behind with it.
        """
        if self._awaited is None:
            answer = self.term.call(self.batch)
            if inspect.isawaitable(answer):
                return _loop().run(_in_time(self.term, lambda: answer))
            if self.term.timeout_s is not None:
                name = f"timeout_s of reward function {self.term.name!r}"
                effect = "has no effect: nothing ends a plain function that is under way"
                remedy = "Write it as `async def`, or leave timeout_s out"
                report([warning(name, "", effect, remedy, self.term.timeout_s)])
                self.term.timeout_s = None
            return answer
        left = None if self.until == math.inf else max(0.0, self.until - time.monotonic())
        done, _ = concurrent.futures.wait([self._awaited], left)
        if done:
            return self._awaited.result()
        _loop.cache_clear()
        limit = f"timeout_s={self.term.timeout_s:g}"
        raise Late(f"it blocks the event loop for longer than {limit}: it waits without await")


def _judged(answer: _Pending) -> RewardResult:
    """The answer of a function about a batch; where it fails, of each row by itself."""
    term, batch = answer.term, answer.batch
    try:
        found = answer.wait()
    except Late as error:
        return failed_result(batch, error)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (a user's function: it costs its rows)
        if len(batch) == 1:
            cause = error.__cause__ if isinstance(error, ExitedError) else None
            return failed_result(batch, cause or error)  # what the function itself raised
        begun = [_Pending(term, batch.row(i)) for i in range(len(batch))]
        rows = [_judged(row) for row in begun]
        names = dict.fromkeys(name for row in rows for name in row.metrics)
        missing = torch.zeros_like(rows[0].values)
        return RewardResult(
            torch.cat([row.values for row in rows]), torch.cat([row.valid for row in rows]),
            {name: torch.cat([row.metrics.get(name, missing) for row in rows]) for name in names},
            {i: row.reasons[0] for i, row in enumerate(rows) if row.reasons},
            next((row.error for row in rows if row.error is not None), None),
        )  # fmt: skip
    return read_answer(term, found, batch)


async def _in_time(term: RewardTerm, begin: Callable[[], Awaitable[Any]]) -> Any:
    said = no_answer(term.timeout_s or math.inf, "timeout_s")
    return await within(term.timeout_s, begin(), said, end_seconds=0.0)


@functools.lru_cache(maxsize=1)
def _loop() -> EventLoop:
    """The event loop of all reward functions in this process."""
    return EventLoop("async-rewards")


_LOOP_SECONDS = 5.0  # that the loop may take beside what it waits for
NOT_FINITE = "the result is NaN or infinite"
_SHOWN = 120  # characters of a text in a message


@dataclass(frozen=True)
class RewardResult:
    """One function's answer: values (NaN: not judged by it) and validity [B], metrics, the reason
    of each row that is not valid, and the first exception."""

    values: torch.Tensor
    valid: torch.Tensor
    metrics: dict[str, torch.Tensor]
    reasons: Mapping[int, str] = field(default_factory=dict)
    error: BaseException | None = None


def failed_result(batch: RewardBatch, error: BaseException) -> RewardResult:
    """The result of a function that raised on all rows."""
    device = batch.completion_ids.device
    values = torch.zeros(len(batch), device=device)
    valid = torch.zeros(len(batch), dtype=torch.bool, device=device)
    reasons = dict.fromkeys(range(len(batch)), Invalid.of(error).reason)
    return RewardResult(values, valid, {}, reasons, error)


def read_answer(term: RewardTerm, answer: Any, batch: RewardBatch) -> RewardResult:
    """Parses a function's return value: scores, or (scores, metrics).

    Raises:
        RewardError: it is of the wrong length or type.
    """
    metrics: Mapping[str, Any] = {}
    reasons: dict[int, str] = {}
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
        answer, metrics = answer
    unjudged = torch.zeros(len(batch), dtype=torch.bool, device=batch.completion_ids.device)
    answer = _listed(answer)
    if isinstance(answer, list) and len(answer) == len(batch):
        unjudged = torch.tensor([one is None for one in answer], device=unjudged.device)
        reasons = {i: one.reason for i, one in enumerate(answer) if isinstance(one, Invalid)}
        nothing = {type(None): 0.0, Invalid: torch.nan}
        answer = [nothing.get(type(one), one) for one in answer]
    values = _numbers(term.name, "scores", answer, batch)
    finite = torch.isfinite(values)
    values = torch.where(finite, values, torch.zeros_like(values))
    for i in (~finite).nonzero().flatten().tolist():
        reasons.setdefault(i, NOT_FINITE)
    numbers = {
        str(name): _numbers(term.name, f"metric {name!r}", given, batch)
        for name, given in metrics.items()
    }
    values = torch.where(unjudged, torch.full_like(values, torch.nan), values)
    return RewardResult(values, finite, numbers, reasons)


def _listed(answer: Any) -> Any:
    """As a list where it is an array, a series or a generator of something. Mappings, sets and
    texts are no answer: what they iterate over is something else."""
    if isinstance(answer, (torch.Tensor, Mapping, Set, str, bytes)):
        return answer
    return list(answer) if isinstance(answer, Iterable) else answer


def _numbers(function: str, what: str, answer: Any, batch: RewardBatch) -> torch.Tensor:
    """The answer as float32 [B]; raises `RewardError` naming the function where it is not."""
    size, answer = len(batch), _listed(answer)
    if not isinstance(answer, torch.Tensor) or answer.is_complex():
        try:
            if not isinstance(answer, list):
                raise TypeError("no list of numbers")
            values = [as_number(value) for value in answer]
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"{what} of reward function {function!r}", f"be {size} numbers, a list or a tensor",
                f"{error}, for a batch beginning with {shown_row(batch, 0)}",
                "Return one number for each completion, None where it is not judged",
                str(answer)[:120],
            ) from error  # fmt: skip
        answer = torch.tensor(values, dtype=torch.float32)
    if answer.shape != (size,):
        raise RewardError(
            f"{what} of reward function {function!r}", f"have shape [{size}]",
            f"it has {[*answer.shape]} for a batch beginning with {shown_row(batch, 0)}",
            "Return a number for each completion",
        )  # fmt: skip
    return answer.detach().to(device=batch.completion_ids.device, dtype=torch.float32)


def shown_row(batch: RewardBatch, i: int) -> str:
    """A row of the batch for a message."""
    if not batch.completions:
        return f"token ids {batch.completion_ids[i][batch.completion_mask[i]].tolist()[:40]}"
    chats = batch.columns.get("messages")
    prompt = (chats and question(chats[i] or ())) or batch.prompts[i]
    return f"prompt {prompt[-_SHOWN:]!r} completion {batch.completions[i][:_SHOWN]!r}"
