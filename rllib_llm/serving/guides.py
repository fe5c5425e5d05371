"""Answers that keep to a JSON Schema, a regular expression or a grammar, through llguidance.

request ─▶ grammar_of: text of the grammar ─▶ Grammars: compiled once, in a thread of its own
rows    ─▶ a copy of the matcher each (LlGuide)
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rllib_llm.engines.engine_loop import settle
from rllib_llm.serving.schemas import ApiError, ResponseFormat, refuse

MAX_GRAMMAR_CHARS = 2**16
_MAX_KEPT = 64
_MAX_WAITING = 64  # to be compiled
# llguidance's limit on the size of regular expressions; with its own, 1,000,000, the first token of
# 6,000 characters of them took 66 s, and with this one 0.1 s. Schemas of 64 KiB stay below.
_LEXER_FUEL = 150_000


class GrammarError(ValueError):
    """A grammar that llguidance does not take."""


class BusyError(RuntimeError):
    """Too many grammars wait to be compiled."""


@dataclass
class _CompiledGrammar:
    """A grammar that is or will be compiled; how many requests wait for it or use it."""

    guide: Future[LlGuide]
    pins: int = 0


class Grammars:
    """Compiles grammars for one model's tokens, one at a time, and keeps the latest.

    Args:
        tokenizer: of the model, a fast one of transformers; None: nothing can be guided.
        eos_token_id: that ends a guided answer.
    """

    def __init__(self, tokenizer: Any, eos_token_id: int | None) -> None:
        self._tokenizer, self._eos = tokenizer, eos_token_id
        self._lock = threading.RLock()  # callbacks of a future that is cancelled run at once
        self._entries: OrderedDict[str, _CompiledGrammar] = OrderedDict()
        self._pins: dict[int, _CompiledGrammar] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._tokens: Any = None  # llguidance's view of the vocabulary; of the thread alone

    def compile(self, grammar: str, pin: int) -> Future[None]:
        """Done when guides can be made by this grammar, or with the GrammarError of one that
        llguidance does not take; the same grammar is compiled once. BusyError where too many wait.

        Args:
            pin: a number of the caller's; the grammar is kept until `release` is called with it,
                and not compiled where all have done so.
        """
        done: Future[None] = Future()
        with self._lock:
            entry = self._entries.get(grammar)
            if entry is None:
                waiting = sum(not each.guide.done() for each in self._entries.values())
                if waiting >= _MAX_WAITING:
                    raise BusyError(f"{waiting} other grammars wait to be compiled")
                entry = self._entries[grammar] = _CompiledGrammar(
                    self._thread.submit(self._compile, grammar)
                )
            entry.pins += 1
            self._pins[pin] = entry
            self._entries.move_to_end(grammar)
        entry.guide.add_done_callback(
            lambda guide: done.cancel() if guide.cancelled() else settle(done, guide.exception())
        )
        return done

    def _compile(self, grammar: str) -> LlGuide:
        import llguidance.hf

        if self._tokens is None:
            self._tokens = llguidance.hf.from_tokenizer(self._tokenizer, eos_token=self._eos)
        limits = llguidance.LLParserLimits(initial_lexer_fuel=_LEXER_FUEL)
        guide = LlGuide(llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=limits))
        if not guide.problem:
            guide.first = guide.allowed()  # which takes the longest, for all copies
        if guide.problem:
            raise GrammarError(guide.problem)
        return guide

    def guide(self, grammar: str) -> LlGuide:
        """A guide by a grammar that was compiled, and not released: nothing is compiled here, where
        others wait."""
        with self._lock:
            entry = self._entries.get(grammar)
        assert entry is not None and entry.guide.done(), "a grammar is compiled before it guides"
        return entry.guide.result().copy()

    def release(self, pin: int) -> None:
        """Releases a grammar that its requester no longer needs; the oldest of those that nobody
        needs are forgotten."""
        with self._lock:
            entry = self._pins.pop(pin, None)
            if entry is not None:
                entry.pins -= 1
                if not entry.pins:
                    entry.guide.cancel()  # where it has not begun
            free = [
                text for text, each in self._entries.items()
                if not each.pins and each.guide.done()
            ]  # fmt: skip
            unwanted = [text for text in free if self._entries[text].guide.cancelled()]
            for text in {*unwanted, *free[: max(0, len(self._entries) - _MAX_KEPT)]}:
                del self._entries[text]

    def close(self) -> None:
        """Ends the thread after its current grammar."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class LlGuide:
    """See `engines.protocol.Guide`; one of llguidance's matchers."""

    def __init__(self, matcher: Any, first: torch.Tensor | None = None) -> None:
        self._matcher, self.first = matcher, first

    def copy(self) -> LlGuide:
        """Another one that has taken the same tokens."""
        return LlGuide(self._matcher.deep_copy(), self.first)

    @property
    def problem(self) -> str:
        """A matcher in error would allow the end, wherever the answer is."""
        if not self._matcher.is_error():
            return ""
        return str(self._matcher.get_error()).partition("\n<state>")[0][:500]

    def allowed(self) -> torch.Tensor:
        """A bit for each token, which the matcher packs into bytes."""
        if self.first is not None:
            return self.first
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(packed, bitorder="little")).bool()

    def take(self, token_id: int) -> None:
        self.first = None
        self._matcher.consume_token(token_id)


def grammar_of(wanted: ResponseFormat) -> tuple[str, str]:
    """The field of a response format, not of free text, that contains a grammar, and the grammar
    for llguidance; 400 where it is too long, or cannot be read."""
    from llguidance import LLMatcher

    def as_schema(schema: Any) -> str:
        return LLMatcher.grammar_from_json_schema(json.dumps(with_single_spaces(schema)))

    schema = wanted.json_schema.schema_ if wanted.json_schema else None
    known: dict[str, tuple[str, Any, Callable[[Any], str]]] = {
        "json_object": ("json_schema", {"type": "object"}, as_schema),
        "json_schema": ("json_schema.schema", schema, as_schema),
        "regex": ("regex", wanted.regex, LLMatcher.grammar_from_regex),
        "grammar": ("grammar", wanted.grammar, LLMatcher.grammar_from_lark),
    }
    name, given, read = known[wanted.type]
    field = f"response_format.{name}"
    refuse(given in (None, ""), f"{field} must be given with type={wanted.type!r}.", field,
           "missing_required_parameter")  # fmt: skip
    try:
        grammar = read(given)
    except (ValueError, RecursionError) as error:
        raise no_good(field, str(error)) from error
    check_length(grammar, field)
    return field, grammar


def check_length(grammar: str, field: str) -> None:
    """Refuses a grammar that would take long to compile."""
    refuse(len(grammar) > MAX_GRAMMAR_CHARS,
           f"{field} must be a grammar of at most {MAX_GRAMMAR_CHARS} characters.", field)


def with_single_spaces(schema: Any) -> Any:
    """A schema of JSON as models write it: else a weak one writes white space for ever."""
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {**schema, "x-guidance": spaces} if isinstance(schema, dict) else schema


def no_good(field: str, problem: str) -> ApiError:
    """The answer to a grammar that is refused."""
    return ApiError(400, f"{field} must be one that can be followed: {problem[:500]}", field)
