"""One reward function: how it is loaded, inspected and called.

All that judges is a function or a `Judge` (models, servers, services, worker processes), is called
by its `RewardTerm`, and becomes part of a `RewardSum`. What an environment says itself, by `score`
and `Response.reward`, needs its state and is added to that sum.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from rllib_llm.shared.columns import IMAGES
from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import Problems, require, unknown_key
from rllib_llm.shared.messages import blamed_on, raised

RewardFunction = Callable[..., Any]
"""A plain function, or a `Judge`."""
_SPEC_KEYS = ("function", "weight", "name", "kwargs", "timeout_s")
# Of a coroutine function that says nothing else.
TIMEOUT_S = 600.0
_RESERVED = ("prompts", "completions", "completion_ids")
_STATE = "trainer_state"
_MOST_LEVELS = 64  # of containers that are copied
_FLAT = (int, str, float)  # most parts of lists, as of token ids


class RewardError(Problems):
    """A reward function that cannot be used, or that failed on a whole batch."""


@dataclass(frozen=True)
class Invalid:
    """In place of a score: what judges failed, for this reason. Nothing is learnt from the row; it
    is never a score of 0."""

    reason: str

    @classmethod
    def of(cls, error: BaseException) -> Invalid:
        """For the reason that this was raised instead of a score; a late answer is a `Late`."""
        return cls(raised(error))

    def __str__(self) -> str:
        return self.reason


_TOKENS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
_TEXTS = ("prompts", "completions", "completion_messages", "context_messages", "images")


@dataclass(frozen=True)
class RewardBatch:
    """The inputs of reward functions: B completions with their prompts.

    prompt_ids [B, P] int64 left-padded, prompt_mask [B, P] bool, completion_ids [B, T] int64
    right-padded, completion_mask [B, T] bool; `prompts` and `completions` are B texts (decoded
    once for all functions, special tokens left out), of a conversation what was said before the
    assistant's last turn, and that turn; `context_messages` are B lists of the messages before it,
    and `completion_messages` of all messages after the first prompt; `images` are the files that
    prompts show, see `images.files_text`; `columns` hold
    the data set's other columns, B values each; `global_step` is the number of updates before this
    batch, `max_steps` that of the whole run (0: unknown), `epoch` how often the data set was
    gone through.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    prompts: Sequence[str] = ()
    completions: Sequence[str] = ()
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    global_step: int = 0
    epoch: float = 0.0
    max_steps: int = 0
    completion_messages: Sequence[Any] | None = None
    context_messages: Sequence[Any] | None = None
    images: Sequence[str] = ()

    @classmethod
    def of_texts(
        cls, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Any]
    ) -> RewardBatch:
        """The batch of texts whose tokens are unknown."""
        ids = torch.zeros(len(completions), 1, dtype=torch.int64)
        return cls(ids, ids.bool(), ids, ids.bool(), list(prompts), list(completions), columns)

    def __len__(self) -> int:
        return self.completion_ids.shape[0]

    def row(self, i: int) -> RewardBatch:
        """The batch of row i alone."""
        of_row = {name: held[i : i + 1] for name in _TEXTS if (held := getattr(self, name))}
        of_row |= {name: getattr(self, name)[i : i + 1] for name in _TOKENS}
        columns = {key: values[i : i + 1] for key, values in self.columns.items()}
        return replace(self, columns=columns, **of_row)


class Judge(Protocol):
    """Protocol of objects that score completions and declare how they are called; see `RewardTerm`,
    which calls functions and judges alike."""

    wants_tokens: bool = False
    wants_texts: bool = False
    wants_transcripts: bool = False
    timeout_s: float | None = None
    """Of a batch; None: its requests have deadlines, and waits for outages, of their own."""
    needed_columns: Sequence[tuple[str, str]] = ()
    """(its setting, the data set's column that this names)."""

    def __call__(self, *args: Any, **columns: Any) -> Any:
        """A number for each completion, `Invalid` where it could not be judged, None where it is
        not this judge's; or these and {metric name: numbers}. It may be async."""

    def metrics(self) -> dict[str, float]:
        """Metrics by name, of all calls so far or of the last one."""
        return {}


class RewardTerm:
    """One reward function with its name and weight.

    The function is called by keyword with prompts, completions, completion_ids (ids without
    padding) and the data set's other columns, all lists of B; what it does not take is not passed.
    Prompts and completions are texts, or, where the prompts are chats, lists of messages, so that a
    completion's text is `completion[0]["content"]`; with a parameter `messages`, which gets the
    chats, or an attribute `wants_texts = True` they are texts then, too: of a conversation all that
    was said before the assistant's last turn, and that turn. With `wants_transcripts = True` they
    are the first prompt and all that was said after it, as texts that depend on no template (what
    judges read). A parameter
    `trainer_state` gets transformers.TrainerState with global_step, epoch and max_steps. Where the
    function has an attribute `wants_tokens = True` it is called as `function(prompt_ids,
    prompt_mask, completion_ids, completion_mask)` with tensors; with a parameter `image_files` too,
    where prompts show images, it is called by keyword. It may be a coroutine function. It
    returns B numbers (list, NumPy array or tensor [B]; in a list None: not judged by this
    function, and `Invalid`: it failed), or a pair of them and {metric name: B numbers}. (The
    convention of trl.GRPOTrainer's reward functions, extended.) Function objects may have a method
    `metrics()`, numbers by name.

    timeout_s: how long an answer that is awaited may take for a batch; then it is cancelled, none
    of its rows is valid, and the batch continues, while what is slow to end does so in the
    background. (Code that blocks the event loop is left behind after twice that time and 5 s: until
    then another function may be to blame.) By default what the function says in an attribute of
    that name, as a `Judge` does, and `TIMEOUT_S` for other coroutine functions.
    """

    def __init__(
        self, function: RewardFunction, weight: float, name: str, timeout_s: float | None = None
    ) -> None:
        place = f"weight of reward function {name!r}"
        require(_is_finite(weight), place, weight, "be a finite number", kind=RewardError)
        self.function, self.weight, self.name = function, float(weight), name
        self.wants_tokens = bool(_attribute(function, "wants_tokens", False))
        inner = _inner(function)
        self.is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(
            getattr(inner, "__call__", None)  # noqa: B004 (an object with an async __call__)
        )
        if timeout_s is None and self.is_async:
            timeout_s = _attribute(function, "timeout_s", TIMEOUT_S)
        self.timeout_s: float | None = timeout_s
        self._named, self._required, self._takes = _parameters(
            function, name, needs_completions=not self.wants_tokens
        )
        names_chats = "messages" in self._named
        self.wants_texts = names_chats or bool(_attribute(function, "wants_texts", False))
        self.wants_transcripts = bool(_attribute(function, "wants_transcripts", False))

    @classmethod
    def from_spec(cls, spec: RewardFunction | str | Mapping[str, Any]) -> RewardTerm:
        """From a callable, a dotted path, or {"function", "weight", "name", "kwargs", "timeout_s"}.

        A class is called with `kwargs` to make the function; a function gets `kwargs` each time.
        """
        function = named_function(spec)
        spec = spec if isinstance(spec, Mapping) else {}
        inner = _inner(function)
        own_name = getattr(inner, "__name__", type(inner).__name__)
        name = str(spec.get("name") or getattr(inner, "name", None) or own_name)
        kwargs = spec.get("kwargs") or {}
        place, is_class = f"kwargs of reward function {name!r}", inspect.isclass(function)
        try:
            signature = inspect.signature(function)
            (signature.bind if is_class else signature.bind_partial)(**kwargs)
        except (TypeError, ValueError) as error:
            raise RewardError(place, "be its arguments by name", error, value=kwargs) from error
        if is_class:
            try:
                with blamed_on(place, kwargs, "be values that it takes", RewardError):
                    function = function(**kwargs)
            except Problems as error:
                raise error.within(place) from error.__cause__
        elif kwargs:
            function = functools.partial(function, **kwargs)
        timeout_s = spec.get("timeout_s")
        require(
            timeout_s is None or (_is_finite(timeout_s) and timeout_s > 0),
            f"timeout_s of reward function {name!r}", timeout_s, "be a number of seconds above 0",
            kind=RewardError,
        )  # fmt: skip
        return cls(function, spec.get("weight", 1.0), name, timeout_s)

    def call(self, batch: RewardBatch) -> Any:
        """Calls the function with copies of what the batch holds, which it may change; returns an
        awaitable if it is async."""
        shows = any(batch.images) and IMAGES in self._named
        if self.wants_tokens and not shows:
            return self.function(*(getattr(batch, name).clone() for name in _TOKENS))
        lengths = batch.completion_mask.sum(-1).tolist()
        rows = zip(batch.completion_ids.tolist(), lengths, strict=True)
        given: dict[str, Any] = {
            **batch.columns, "prompts": batch.prompts, "completions": batch.completions,
            "completion_ids": [row[:length] for row, length in rows],
        }  # fmt: skip
        if "messages" in batch.columns:
            begun = batch.columns["messages"]
            said = batch.completion_messages or [
                [{"role": "assistant", "content": text}] for text in batch.completions
            ]
            if self.wants_transcripts:
                given["prompts"], given["completions"] = map(transcripts, (begun, said))
            elif not self.wants_texts:
                given["prompts"], given["completions"] = begun, said
            elif batch.context_messages is not None:
                given["messages"] = batch.context_messages
        if shows:
            given[IMAGES] = batch.images
        taken = {k: copied([*v]) for k, v in given.items() if self._takes(k)}
        if _STATE in self._named:
            from transformers import TrainerState  # takes seconds, and few ask for it

            taken[_STATE] = TrainerState(
                global_step=batch.global_step, epoch=batch.epoch, max_steps=batch.max_steps
            )
        return self.function(**taken)

    def metrics(self) -> dict[str, float]:
        """The metrics of the function's own `metrics()` method, as "<name>/<metric>"."""
        report = _attribute(self.function, "metrics", None)
        return {f"{self.name}/{key}": value for key, value in report().items()} if report else {}

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises `RewardError` where the data set's columns do not suit the function."""
        if self.wants_tokens:
            return
        for column in columns:
            reason = "reward functions get the prompts or completions under it"
            require(column not in _RESERVED, "column", column, "have another name", reason,
                    kind=RewardError)  # fmt: skip
        for setting, column in _attribute(self.function, "needed_columns", ()):
            required_column(dict.fromkeys(columns), setting, column)
        missing = sorted(self._required - {*columns, *_RESERVED, _STATE})
        require(
            not missing, f"reward function {self.name!r}", ...,
            f"find its arguments {missing} among the columns of the prompts",
            f"there are {sorted(columns) or 'none'}", "Add them, or give defaults or 'kwargs'",
            kind=RewardError,
        )  # fmt: skip


def named_function(spec: RewardFunction | str | Mapping[str, Any]) -> Any:
    """The callable that `RewardTerm.from_spec` calls or, where it is a class, makes.

    Raises:
        RewardError: unknown keys, nothing callable, or a judge that only asks.
        Problems: a path that names nothing.
    """
    if not isinstance(spec, Mapping):
        spec = {"function": spec}
    if unknown := [key for key in spec if key not in _SPEC_KEYS]:
        raise RewardError([unknown_key("rewards.functions", key, _SPEC_KEYS) for key in unknown])
    name = "rewards.functions"
    require("function" in spec, name, dict(spec), "have 'function'", kind=RewardError)
    function = given = spec["function"]
    if isinstance(given, str):
        function = import_dotted(given, name=name)
    rule = "be a callable or the dotted path of one"
    require(callable(function), name, given, rule, kind=RewardError)
    made = function if inspect.isclass(function) else type(function)
    if getattr(made, "__call__", None) is Judge.__call__:  # noqa: B004
        raise RewardError(
            "rewards.functions", "score completions", "judges build on this class, which has no "
            "__call__", "Name one that scores, such as JudgeServer or RubricJudge of "
            "rllib_llm.envs.judges.llm_judges", f"{made.__module__}.{made.__name__}",
        )  # fmt: skip
    return function


def check_names(names: Sequence[str], functions: Any) -> None:
    """Raises RewardError where there is no function, or two have one of the `names`."""
    require(0 < len(names) == len({*names}), "rewards.functions", functions,
            "be one or more functions with names of their own", f"they are named {[*names]}",
            kind=RewardError)  # fmt: skip


def required_column(columns: Mapping[str, Any], setting: str, name: str) -> Sequence[Any]:
    """The data set's column that the `setting` of a judge names: B values; raises Problems where it
    has none."""
    require(name in columns, setting, name,
            f"be a column of the data set, one of {sorted(columns)}",
            "the judge compares with it")  # fmt: skip
    return columns[name]


def transcripts(chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Each chat as text, independent of templates: the text of a single message, else a line for
    each message with its role and tool calls."""
    return [
        _words(chat[0]) if len(chat) == 1 and not chat[0].get("tool_calls")
        else "\n".join(map(shown_message, chat)) for chat in chats
    ]  # fmt: skip


_FORGED = re.compile(r"^\[(?=(system|user|assistant|tool|developer)\])", re.MULTILINE)


def shown_message(message: Mapping[str, Any]) -> str:
    """A message as text: role, words and tool calls. A line of its words that looks like another
    message's is broken up: judges would take it for one."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    called = "".join(f" {call.get('name')}({call.get('arguments')})" for call in calls)
    return f"[{message['role']}] {_FORGED.sub('[ ', _words(message))}{called}"


def question(messages: Sequence[Mapping[str, Any]]) -> str:
    """The words of the last message of a user; "" without one."""
    asked = [message for message in messages if message["role"] == "user"]
    return _words(asked[-1]) if asked else ""


def _words(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "" if content is None else str(content)


def as_number(value: Any) -> float:
    """The float of a number, infinity of one too large; raises TypeError or ValueError for other
    values, also for the text of a number: mostly it is a completion."""
    if isinstance(value, (str, bytes)):
        raise TypeError("text is no number")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _inner(function: Any) -> Any:
    """The function within one to which `kwargs` were bound."""
    return function.func if isinstance(function, functools.partial) else function


def _attribute(function: Any, name: str, default: Any) -> Any:
    return getattr(_inner(function), name, default)


def _parameters(
    function: RewardFunction, name: str, *, needs_completions: bool
) -> tuple[set[str], set[str], Callable[[str], bool]]:
    """Names of the parameters that are not bound by `kwargs`, those without a default, and whether
    an argument of a name is passed."""
    bound = set(function.keywords) if isinstance(function, functools.partial) else set()
    if not inspect.isfunction(_inner(function)):
        bound.add("self")  # of the object that is called: no column can be given under it
    parameters = list(inspect.signature(function).parameters.values())
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {p.name for p in parameters if p.name in named and p.default is p.empty}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    require(
        not needs_completions or takes_any or "completions" in named, f"reward function {name!r}",
        ..., "take 'completions' (and may take 'prompts', columns of the data set, **columns)",
        f"it takes {sorted(named)}", kind=RewardError,
    )  # fmt: skip
    return named - bound, required - bound, lambda n: n not in bound and (takes_any or n in named)


UNREWARDED = "rllib_llm.envs.judges.reward_functions.no_reward"


def no_reward(completions: Sequence[str]) -> list[float]:
    """0 for each completion: of stages that need no rewards."""
    return [0.0] * len(completions)


def copied(value: Any, levels: int = _MOST_LEVELS) -> Any:
    """A deep copy of containers and arrays, for a user's function that may change what it is given;
    other objects, and parts deeper than `levels`, are shared."""
    if isinstance(value, dict) and levels:
        return {key: copied(part, levels - 1) for key, part in value.items()}
    if (isinstance(value, list) or type(value) is tuple) and levels:
        parts = [part if type(part) in _FLAT else copied(part, levels - 1) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value.copy() if isinstance(value, (set, bytearray, np.ndarray)) else value
