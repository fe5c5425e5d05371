"""Answers that keep to a JSON Schema, a regular expression or a grammar, through llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch

from rllib_llm.engines.guide import Guide
from rllib_llm.engines.params import SamplingParams
from rllib_llm.serving.errors import ApiError
from rllib_llm.serving.schemas import ResponseFormat

_ANY_OBJECT = {"type": "object"}


class Guides:
    """Makes guides for one model's tokens.

    Args:
        tokenizer: of the model, a fast one of transformers.
        eos_token_id: that ends a guided answer; None: the model has none, and nothing is guided.
    """

    def __init__(self, tokenizer: Any, eos_token_id: int | None) -> None:
        self._tokenizer, self._eos = tokenizer, eos_token_id
        self._lock = threading.Lock()
        self._tokens: Any = None  # llguidance's view of the vocabulary, made when first asked for

    def maker(self, wanted: ResponseFormat, params: SamplingParams) -> Callable[[], Guide] | None:
        """What makes a guide for each completion; None where there is nothing to keep to.

        Raises:
            ApiError: 400, the schema or grammar is no good.
        """
        if wanted.type == "text":
            return None
        field, grammar = self._grammar(wanted)
        if self._eos is None or self._eos not in params.stop_token_ids:
            raise ApiError(
                400, "response_format must come with the model's EOS token as a stop token: it "
                "ends the answer. Leave out ignore_eos.", param="response_format",
                code="unsupported_value",
            )  # fmt: skip
        if params.min_new_tokens:
            raise ApiError(
                400, "min_tokens must be left out with response_format, which says when the answer "
                "ends.", param="min_tokens", code="unsupported_value",
            )  # fmt: skip
        matcher = self._matcher(grammar)
        problem = matcher.get_error()
        if problem:
            raise _no_good(field, problem)
        return lambda: LlGuide(matcher.deep_copy(), grammar)

    def guide(self, grammar: str) -> LlGuide:
        """A guide by llguidance's grammar, which is good."""
        return LlGuide(self._matcher(grammar), grammar)

    def _grammar(self, wanted: ResponseFormat) -> tuple[str, str]:
        """The field that says it, and llguidance's grammar of it."""
        from llguidance import LLMatcher

        schema = wanted.json_schema.schema_ if wanted.json_schema else None
        known: dict[str, tuple[str, Any, Callable[[Any], str]]] = {
            "json_object": ("json_schema", _ANY_OBJECT, _as_schema),
            "json_schema": ("json_schema.schema", schema, _as_schema),
            "regex": ("regex", wanted.regex, LLMatcher.grammar_from_regex),
            "grammar": ("grammar", wanted.grammar, LLMatcher.grammar_from_lark),
        }
        name, given, read = known[wanted.type]
        field = f"response_format.{name}"
        if given is None or given == "":
            raise ApiError(
                400, f"{field} must be given with type={wanted.type!r}.", param=field,
                code="missing_required_parameter",
            )  # fmt: skip
        try:
            return field, read(given)
        except (ValueError, RecursionError) as error:
            raise _no_good(field, str(error)) from error

    def _matcher(self, grammar: str) -> Any:
        import llguidance.hf

        with self._lock:
            if self._tokens is None:
                self._tokens = llguidance.hf.from_tokenizer(self._tokenizer, eos_token=self._eos)
        return llguidance.LLMatcher(self._tokens, grammar, log_level=0)


def _as_schema(schema: Any) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def _no_good(field: str, problem: str) -> ApiError:
    return ApiError(
        400, f"{field} must be one that can be followed: {problem[:500]}", param=field,
        code="invalid_value",
    )  # fmt: skip


class LlGuide:
    """See `Guide`; one of llguidance's matchers, and the grammar that it was made of."""

    def __init__(self, matcher: Any, grammar: str) -> None:
        self._matcher, self.grammar = matcher, grammar

    def allowed(self) -> torch.Tensor:
        """As of all guides: a bit for each token, which the matcher packs into bytes."""
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = torch.arange(8, dtype=torch.uint8)
        return ((packed.unsqueeze(1) >> bits) & 1).bool().reshape(-1)

    def take(self, token_id: int) -> None:
        """As of all guides."""
        self._matcher.consume_token(token_id)
