"""Reward functions, and their weighted sum over a batch of completions."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import traceback
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rllib_llm.dotted import import_dotted

RewardFunction = Callable[..., Any]
_SPEC_KEYS = ("function", "weight", "name", "kwargs")
_RESERVED = ("prompts", "completions", "completion_ids")


class RewardError(ValueError):
    """A reward function that cannot be used, or that failed on a whole batch."""


@dataclass(frozen=True)
class RewardBatch:
    """What reward functions may look at: B completions with their prompts.

    prompt_ids [B, P] int64 left-padded, prompt_mask [B, P] bool, completion_ids [B, T] int64
    right-padded, completion_mask [B, T] bool; `prompts` and `completions` are B texts (decoded
    once for all functions, special tokens left out); `columns` hold the data set's other columns,
    B values each.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    prompts: Sequence[str] = ()
    completions: Sequence[str] = ()
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.completion_ids.shape[0]

    @functools.cached_property
    def completion_id_lists(self) -> list[list[int]]:
        """The ids of each completion without its padding."""
        lengths = self.completion_mask.sum(-1).tolist()
        rows = self.completion_ids.tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def row(self, i: int) -> RewardBatch:
        """The batch of row i alone."""
        return replace(
            self,
            prompt_ids=self.prompt_ids[i : i + 1],
            prompt_mask=self.prompt_mask[i : i + 1],
            completion_ids=self.completion_ids[i : i + 1],
            completion_mask=self.completion_mask[i : i + 1],
            prompts=self.prompts[i : i + 1],
            completions=self.completions[i : i + 1],
            columns={key: values[i : i + 1] for key, values in self.columns.items()},
        )


@dataclass(frozen=True)
class Rewards:
    """Scores of B completions, all tensors [B] on one device.

    scores float32 (the weighted sum, 0 where not valid), valid bool, components float32 by function
    name before weighting (0 where that function failed), metrics float32 by name (diagnostics of
    the functions that are no reward; 0 where that function failed).
    """

    scores: torch.Tensor
    valid: torch.Tensor
    components: dict[str, torch.Tensor]
    metrics: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Result:
    """One function's answer: values and validity [B], metrics, the first failure's traceback."""

    values: torch.Tensor
    valid: torch.Tensor
    metrics: dict[str, torch.Tensor]
    failure: str = ""


class RewardTerm:
    """One reward function with its name and weight.

    The function is called by keyword with prompts, completions (texts), completion_ids (ids
    without padding) and the data set's other columns, all lists of B; what it does not take is not
    passed. Where it has an attribute `wants_tokens = True` it is called as `function(prompt_ids,
    prompt_mask, completion_ids, completion_mask)` with tensors. It may be a coroutine function. It
    returns B numbers (list, NumPy array or tensor [B]), or a pair of them and
    {metric name: B numbers}. (The convention of trl.GRPOTrainer's reward functions, extended.)
    """

    def __init__(self, function: RewardFunction, weight: float, name: str) -> None:
        self.function = function
        self.weight = float(weight)
        self.name = name
        self.wants_tokens = bool(_attribute(function, "wants_tokens", False))
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (an object with an async __call__)
        )
        self._names = None if self.wants_tokens else _parameters(function, name)

    @classmethod
    def from_spec(cls, spec: RewardFunction | str | Mapping[str, Any]) -> RewardTerm:
        """From a callable, a dotted path, or {"function", "weight", "name", "kwargs"}.

        A class is called with `kwargs` to make the function; a function gets `kwargs` each time.
        """
        if not isinstance(spec, Mapping):
            spec = {"function": spec}
        unknown = [key for key in spec if key not in _SPEC_KEYS]
        if unknown or "function" not in spec:
            raise RewardError(
                f"reward_functions={dict(spec)!r} must have 'function' and may have 'weight', "
                f"'name', 'kwargs': {'unknown ' + repr(unknown) if unknown else 'no function'}. "
                "Correct the keys."
            )
        function = spec["function"]
        if isinstance(function, str):
            function = import_dotted(function, name="reward_functions")
        if not callable(function):
            raise RewardError(
                f"reward_functions={spec['function']!r} must be a callable or the dotted path of "
                f"one: it is {type(function).__name__}. Point it at a function."
            )
        name = spec.get("name") or _default_name(function)
        kwargs = dict(spec.get("kwargs") or {})
        if inspect.isclass(function):
            function = function(**kwargs)
        elif kwargs:
            function = functools.partial(function, **kwargs)
        return cls(function, spec.get("weight", 1.0), name)

    def call(self, batch: RewardBatch) -> Any:
        """What the function returns for `batch` (an awaitable where it is async)."""
        if self.wants_tokens:
            return self.function(
                batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask
            )
        given: dict[str, Any] = {
            **batch.columns,
            "prompts": batch.prompts,
            "completions": batch.completions,
            "completion_ids": batch.completion_id_lists,
        }
        return self.function(**{k: list(v) for k, v in given.items() if self._names.takes(k)})

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raises `RewardError` where the data set's columns do not suit the function."""
        if self._names is None:
            return
        for column in columns:
            if column in _RESERVED:
                raise RewardError(
                    f"column={column!r} must have another name: reward functions get the prompts "
                    "or completions under it. Rename the column of the data set."
                )
        missing = sorted(self._names.required - set(columns) - set(_RESERVED))
        if missing:
            raise RewardError(
                f"reward function {self.name!r} must find its arguments {missing} among the "
                f"columns of the prompts: there are {sorted(columns)}. Add the columns, or give "
                "the arguments defaults or 'kwargs'."
            )


class RewardSum:
    """The weighted sum of several reward functions, each one's failures costing only its rows.

    A function that raises on the batch is called again row by row; rows on which it still raises,
    and rows it gives NaN or infinity, are not valid: they are counted in `num_failed`, and the
    first of each function is shown in a warning. Coroutine functions run concurrently.

    Raises:
        RewardError: at construction for a wrong setting; when called for an answer of the wrong
            length or type, or where a function fails on every row of the batch.
    """

    def __init__(self, functions: Sequence[Any] | Any) -> None:
        if isinstance(functions, (str, Mapping)) or callable(functions):
            functions = [functions]
        self.terms = [
            f if isinstance(f, RewardTerm) else RewardTerm.from_spec(f) for f in functions or ()
        ]
        names = [term.name for term in self.terms]
        if not names or len(set(names)) < len(names):
            problem = f"the names {names} repeat" if names else "there is none"
            raise RewardError(
                f"reward_functions={functions!r} must be one or more functions with names of their "
                f"own: {problem}. Give each a 'function' and a 'name'."
            )
        self.num_failed = dict.fromkeys(names, 0)
        self._warned: set[str] = set()

    @property
    def wants_texts(self) -> bool:
        """True where any function reads texts, so that the batch must be decoded."""
        return not all(term.wants_tokens for term in self.terms)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raises `RewardError` where the data set's columns do not suit every function."""
        for term in self.terms:
            term.check_columns(columns)

    def __call__(self, batch: RewardBatch) -> Rewards:
        """Scores of the batch, on the device of `batch.completion_ids`."""
        results = self._results(batch)
        device = batch.completion_ids.device
        scores = torch.zeros(len(batch), device=device)
        valid = torch.ones(len(batch), dtype=torch.bool, device=device)
        components, metrics = {}, {}
        for term, result in zip(self.terms, results, strict=True):
            self._report(term, result, batch)
            components[term.name] = result.values
            scores = scores + term.weight * result.values
            valid = valid & result.valid
            for name, values in result.metrics.items():
                if name in metrics:
                    raise RewardError(
                        f"metric={name!r} must come from one reward function: {term.name!r} and "
                        "another return it. Rename one."
                    )
                metrics[name] = values
        scores = torch.where(valid, scores, torch.zeros_like(scores))
        return Rewards(scores, valid, components, metrics)

    def _results(self, batch: RewardBatch) -> list[_Result]:
        """Async functions wait together in the background while the others compute."""
        waiting = {
            term.name: asyncio.run_coroutine_threadsafe(_judge_async(term, batch), _loop())
            for term in self.terms
            if term.is_async
        }
        results = {t.name: _judge(t, batch) for t in self.terms if not t.is_async}
        results.update({name: future.result() for name, future in waiting.items()})
        return [results[term.name] for term in self.terms]

    def _report(self, term: RewardTerm, result: _Result, batch: RewardBatch) -> None:
        failed = (~result.valid).nonzero().flatten().tolist()
        if not failed:
            return
        self.num_failed[term.name] += len(failed)
        reason = result.failure or "the result is NaN or infinite"
        shown = _shown(batch, failed[0])
        if len(failed) == len(batch):
            raise RewardError(
                f"reward function {term.name!r} must judge at least one completion of a batch: "
                f"it failed on all {len(batch)}. The first is {shown}. Correct the function.\n"
                f"{reason}"
            )
        if term.name not in self._warned:
            self._warned.add(term.name)
            warnings.warn(
                f"reward function {term.name!r} failed on {len(failed)} of {len(batch)} "
                f"completions, which are left out; the first is {shown}. Later failures are only "
                f"counted (num_failed).\n{reason}",
                stacklevel=3,
            )


def _judge(term: RewardTerm, batch: RewardBatch) -> _Result:
    # Whatever a user's function raises costs its rows, hence the breadth of the excepts here.
    answer, failure = None, ""
    try:
        answer = term.call(batch)
        if inspect.isawaitable(answer):
            answer = asyncio.run_coroutine_threadsafe(_awaited(answer), _loop()).result()
    except Exception:
        failure = traceback.format_exc()
    if not failure:
        return _read_answer(term, answer, batch)
    if len(batch) == 1:
        return _failed(batch, failure)
    return _join([_judge(term, batch.row(i)) for i in range(len(batch))])


async def _judge_async(term: RewardTerm, batch: RewardBatch) -> _Result:
    answer, failure = None, ""
    try:
        answer = await term.call(batch)
    except Exception:
        failure = traceback.format_exc()
    if not failure:
        return _read_answer(term, answer, batch)
    if len(batch) == 1:
        return _failed(batch, failure)
    rows = (_judge_async(term, batch.row(i)) for i in range(len(batch)))
    return _join(await asyncio.gather(*rows))


@functools.lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for the process, in a thread of its own, so that clients bound to a loop live
    from batch to batch, and a loop already running in this thread (a notebook's) is no matter."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async-rewards", daemon=True).start()
    return loop


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def _failed(batch: RewardBatch, failure: str) -> _Result:
    device = batch.completion_ids.device
    values = torch.zeros(len(batch), device=device)
    return _Result(values, torch.zeros(len(batch), dtype=torch.bool, device=device), {}, failure)


def _join(rows: Sequence[_Result]) -> _Result:
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    missing = torch.zeros_like(rows[0].values)
    return _Result(
        torch.cat([row.values for row in rows]),
        torch.cat([row.valid for row in rows]),
        {name: torch.cat([row.metrics.get(name, missing) for row in rows]) for name in names},
        next((row.failure for row in rows if row.failure), ""),
    )


def _read_answer(term: RewardTerm, answer: Any, batch: RewardBatch) -> _Result:
    metrics: Mapping[str, Any] = {}
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
        answer, metrics = answer
    values = _numbers(term.name, "scores", answer, batch)
    finite = torch.isfinite(values)
    return _Result(
        torch.where(finite, values, torch.zeros_like(values)),
        finite,
        {
            str(name): _numbers(term.name, f"metric {name!r}", given, batch)
            for name, given in metrics.items()
        },
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
                f"({error}) for a batch beginning with {_shown(batch, 0)}. Return one number for "
                "each completion, float('nan') where there is none."
            ) from error
        answer = torch.tensor(values, dtype=torch.float32)
    if answer.shape != (size,):
        raise RewardError(
            f"{what} of reward function {function!r} must have shape [{size}], one number for "
            f"each completion: it has {list(answer.shape)} for a batch beginning with "
            f"{_shown(batch, 0)}. Return {size} numbers; squeeze extra dimensions."
        )
    return answer.detach().to(device=batch.completion_ids.device, dtype=torch.float32)


def _shown(batch: RewardBatch, i: int) -> str:
    if not batch.completions:
        return f"token ids {batch.completion_ids[i][batch.completion_mask[i]].tolist()[:40]}"
    return f"prompt {batch.prompts[i][-200:]!r} completion {batch.completions[i][:200]!r}"


def _attribute(function: Any, name: str, default: Any) -> Any:
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, name, default)


def _default_name(function: Any) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "name", None) or getattr(inner, "__name__", type(inner).__name__))


@dataclass(frozen=True)
class _Parameters:
    """Names of a reward function's parameters, those bound by `kwargs` left out."""

    named: frozenset[str]
    required: frozenset[str]
    bound: frozenset[str]
    takes_any: bool

    def takes(self, name: str) -> bool:
        return name not in self.bound and (self.takes_any or name in self.named)


def _parameters(function: RewardFunction, name: str) -> _Parameters:
    bound = set(function.keywords) if isinstance(function, functools.partial) else set()
    parameters = list(inspect.signature(function).parameters.values())
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {p.name for p in parameters if p.name in named and p.default is p.empty}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not takes_any and "completions" not in named:
        raise RewardError(
            f"reward function {name!r} must take 'completions' (and may take 'prompts', columns of "
            f"the data set, **columns): it takes {[p.name for p in parameters]}. Change its "
            "signature."
        )
    return _Parameters(
        frozenset(named - bound), frozenset(required - bound), frozenset(bound), takes_any
    )
