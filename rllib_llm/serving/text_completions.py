"""Completions of texts, as OpenAI shows them, and of token ids, as vLLM does."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rllib_llm.data.decoding import TextStream
from rllib_llm.data.encoding import encode_text
from rllib_llm.serving.completions import View, entries, finite
from rllib_llm.serving.jobs import Job, Piece
from rllib_llm.serving.schemas import GenerateParams, refuse
from rllib_llm.serving.service import Event, RequestContext

_COMPLETION_TOKENS = 16  # OpenAI's default


class TextView(View):
    """Text completions as OpenAI shows them."""

    def __init__(self, context: RequestContext, body: Any) -> None:
        names = {"id": f"cmpl-{context.answer_id(body.seed)}", "object": "text_completion"}
        super().__init__(context, body, **names, created=int(time.time()))
        self._n = body.n or 1
        self._prompts: list[list[int]] = []
        self._echoes: list[str] = []

    async def job(self) -> Job:
        body = self.body
        await self.context.beside_loop(self._read)
        scored = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            scored = max(scored or 0, body.logprobs)
        return await self.guided(self.service.limits.job(
            body, self._prompts, body.max_tokens, default=_COMPLETION_TOKENS, field="max_tokens",
            prompt_field="prompt", least=0 if body.echo else 1, top_logprobs=body.logprobs or 0,
            prompt_logprobs=scored, version=self.context.version, continues_text=True,
            samples=body.max_tokens != 0,
        ))  # fmt: skip

    def _read(self) -> None:
        given, limits, tokenizer = self.body.prompt, self.service.limits, self.service.tokenizer
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        for each in given:
            if isinstance(each, str):
                limits.check_chars(each, "prompt")
                each = encode_text(tokenizer, each)
            refuse(not each, "prompt must have at least one token.", "prompt")
            limits.check_tokens(each, "prompt")
            self._prompts.append(list(each))
        if self.body.echo:
            decode = tokenizer.decode
            self._echoes = [decode(each, skip_special_tokens=True) for each in self._prompts]

    def choices(self) -> list[dict[str, Any]]:
        """The choices of a whole answer, in which the echoed prompt and the completion are one
        text."""
        found = []
        for at in range(len(self._prompts)):
            further, echo = {}, self._echo(at) if self._echoes else None
            if self.body.prompt_logprobs is not None:
                further = {"prompt_logprobs": self.prompt_logprobs(at)}
            for i in range(at * self._n, (at + 1) * self._n):
                choice = self.choice(i, self.whole[i]) | further
                if echo is not None:
                    choice["text"] = echo["text"] + choice["text"]
                    for name, values in (choice["logprobs"] or {}).items():
                        if (first := echo["logprobs"][name]) is not None:
                            choice["logprobs"][name] = [*first, *(values or [])]
                found.append(choice)
        return found

    def before(self) -> list[dict[str, Any]]:
        """Choices with the echoed prompts, and the ends where nothing is sampled."""
        echoes = [self._echo(at) for at in range(len(self._echoes))]
        found = [{"index": i, **echoes[i // self._n]} for i in range(len(echoes) * self._n)]
        if not self.running.job.samples:
            end = {"text": "", "logprobs": None, "finish_reason": "length"}
            found += [{"index": i, **end} for i in range(len(self.whole))]
        return found

    def choice(self, i: int, piece: Piece) -> dict[str, Any]:
        at, logprobs = i // self._n, None
        if self.body.logprobs is not None:
            logprobs = self._logprobs(piece, len(self._echoes[at]) if self._echoes else 0)
        end = self.ended(piece, piece.finish_reason, logprobs, self._prompts[at])
        return {"index": i, "text": piece.text, **end}

    def _echo(self, at: int) -> dict[str, Any]:
        """Prompt `at` as its choices echo it."""
        told = None
        if self.body.logprobs is not None:
            ids, scores = self._prompts[at], self.scores[at]
            logprobs, likeliest = [math.nan, *scores.logprobs], [[], *scores.likeliest]
            stream, offsets = TextStream(self.service.tokenizer), []
            for token in ids:
                offsets.append(stream.length)
                stream.push(token)
            prompt = Piece("", ids, logprobs, likeliest, offsets=offsets)
            told = self._logprobs(prompt, 0)
        return {"text": self._echoes[at], "logprobs": told, "finish_reason": None}

    def _logprobs(self, piece: Piece, start: int) -> dict[str, Any]:
        """`logprobs` of a completion whose text begins at character `start`."""
        top = self.body.logprobs

        def name(token: int) -> str:
            text, raw = self.service.texts.of(token)
            is_whole = text.encode() == bytes(raw)  # else a part of a character
            return text if is_whole else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

        def named(place: Sequence[tuple[int, float]]) -> dict[str, float | None]:
            found: dict[str, float | None] = {}
            for token, value in place[:top]:
                key = name(token)
                found[f"token_id:{token}" if key in found else key] = finite(value)
            return found

        return {
            "tokens": [name(token) for token in piece.token_ids],
            "token_logprobs": [finite(value) for value in piece.logprobs],
            "top_logprobs": [named(place) or None for place in piece.likeliest] if top else None,
            "text_offset": [start + at for at in piece.offsets],
        }


class TokenView(View):
    """Completions as vLLM's /inference/v1/generate shows them."""

    fields = {name: f"sampling_params.{name}" for name in GenerateParams.model_fields}

    def __init__(self, context: RequestContext, body: Any) -> None:
        context.request_id = body.request_id or context.request_id
        super().__init__(context, body, request_id=context.request_id)

    async def job(self) -> Job:
        fields, prompt, limits = self.body.sampling_params, self.body.token_ids, self.service.limits
        await self.context.beside_loop(limits.check_tokens, prompt, "token_ids")
        return limits.job(
            fields, [prompt], fields.max_tokens, default=limits.default_max_tokens,
            field="max_tokens", prompt_field="token_ids", top_logprobs=fields.logprobs or 0,
            prompt_logprobs=fields.prompt_logprobs, version=self.context.version,
        )  # fmt: skip

    def further(self) -> dict[str, Any]:
        return {
            "prompt_token_ids": self.body.token_ids if self.body.return_token_ids else None,
            "prompt_logprobs": self.prompt_logprobs(0) if self.scores else None,
        }

    def chunks(self, i: int, piece: Piece) -> list[Event]:
        return self.chunk(self.choice(i, piece))

    def choice(self, i: int, piece: Piece) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            # By text and by number, for clients of either of vLLM's shapes.
            return {"token": f"token_id:{token}", "token_id": token, "logprob": finite(logprob)}

        top = self.body.sampling_params.logprobs
        choice: dict[str, Any] = {
            "index": i,
            "token_ids": piece.token_ids,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            "logprobs": None if top is None else {"content": entries(piece, top, entry)},
        }
        if piece.finish_reason is not None:
            spans: list[dict[str, Any]] = []
            for serial, sampled in groupby(self.whole[i].versions):
                start = spans[-1]["end"] if spans else 0
                told = {"version": self.service.weights.of(serial).label, "start": start}
                spans.append({**told, "end": start + len([*sampled])})
            choice["weight_versions"] = spans
        if self.body.output_mode == "text":
            choice["text"] = piece.text
        return choice
