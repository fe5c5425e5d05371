"""Completions as OpenAI shows them: choices of a whole answer, and of chunks."""

from __future__ import annotations

from typing import Any

from rllib_llm.serving import chat
from rllib_llm.serving.answers import chat_logprobs, finite, text_logprobs
from rllib_llm.serving.choices import Piece
from rllib_llm.serving.errors import ApiError
from rllib_llm.serving.schemas import ChatRequest, CompletionRequest
from rllib_llm.serving.service import Service
from rllib_llm.serving.texts import TextStream


class ChatView:
    """A chat's completions as OpenAI shows them.

    Args:
        service: that answers.
        body: the request.
        prompt: its token ids.
        chat_format: reads calls of tools; None: there are none. With it a turn is shown when it is
            whole: before, nobody knows what is a call.
    """

    def __init__(
        self, service: Service, body: ChatRequest, prompt: list[int], chat_format: Any
    ) -> None:
        self._service, self._body, self._prompt = service, body, prompt
        self._format = chat_format
        self._begun: set[int] = set()
        self._held: dict[int, Piece] = {}

    def choices(self, pieces: list[Piece], n: int) -> list[dict[str, Any]]:
        return [self._choice(i, piece) for i, piece in enumerate(pieces)]

    def _choice(self, i: int, piece: Piece) -> dict[str, Any]:
        message, finish = self._message(piece)
        return {"index": i, "message": {**message, "refusal": None}, **self._end(piece, finish)}

    def _message(self, piece: Piece) -> tuple[dict[str, Any], str | None]:
        if self._format is None or isinstance(piece.stop_reason, str):
            return {"role": "assistant", "content": piece.text}, piece.finish_reason
        return chat.assistant_message(
            self._format, piece.token_ids, self._prompt, piece.finish_reason
        )

    def _end(self, piece: Piece, finish: str | None) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs:
            logprobs = chat_logprobs(self._service, piece, self._body.top_logprobs or 0)
        ended: dict[str, Any] = {"logprobs": logprobs, "finish_reason": finish}
        if finish is not None:
            ended["stop_reason"] = piece.stop_reason
        if self._body.return_token_ids:
            ended |= {"token_ids": piece.token_ids, "prompt_token_ids": self._prompt}
        return ended

    def chunks(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        if self._format is not None:
            held = self._held.setdefault(i, Piece())
            held.add(piece)
            if piece.finish_reason is None:
                return []
            message, finish = self._message(held)
            calls = [{"index": k, **call} for k, call in enumerate(message.pop("tool_calls", ()))]
            return [
                self._chunk(i, held, message | ({"tool_calls": calls} if calls else {}), finish)
            ]
        if not (piece.text or piece.finish_reason or self._told(piece)):
            return []
        return [self._chunk(i, piece, {"content": piece.text}, piece.finish_reason)]

    def _told(self, piece: Piece) -> bool:
        """Whether the tokens themselves are told, whatever their text."""
        return bool(piece.token_ids and (self._body.logprobs or self._body.return_token_ids))

    def _chunk(
        self, i: int, piece: Piece, delta: dict[str, Any], finish: str | None
    ) -> dict[str, Any]:
        if i not in self._begun:
            self._begun.add(i)
            delta = {"role": "assistant", **delta}
        return {"index": i, "delta": delta, **self._end(piece, finish)}


class TextView:
    """Text completions as OpenAI shows them."""

    def __init__(self, service: Service, body: CompletionRequest, prompts: list[list[int]]) -> None:
        self._service, self.body, self._prompts = service, body, prompts
        self._n = body.n or 1
        self._lengths: dict[int, int] = {}  # characters that were shown, of each completion
        self._echoes: list[tuple[str, dict[str, Any] | None]] = []

    async def score(self, version: int | None) -> None:
        """Finds what echo shows of the prompts, with log-probs if they are asked for."""
        tokenizer, texts = self._service.tokenizer, self._service.texts
        for prompt in self._prompts:
            text = tokenizer.decode(prompt, skip_special_tokens=True)
            logprobs = None
            if self.body.logprobs is not None:
                top = self.body.logprobs
                try:
                    scores = await self._service.score(prompt, top, version)
                except ValueError as error:
                    raise ApiError(400, str(error), param="prompt") from error
                likeliest = [{texts.of(i)[0]: finite(v) for i, v in at} for at in scores.likeliest]
                logprobs = {
                    "tokens": [texts.of(token)[0] for token in prompt],
                    "token_logprobs": [None, *map(finite, scores.logprobs)],
                    "top_logprobs": [None, *likeliest] if top else None,
                    "text_offset": _offsets(tokenizer, prompt),
                }
            self._echoes.append((text, logprobs))

    def choices(self, pieces: list[Piece], n: int) -> list[dict[str, Any]]:
        return [self._choice(i, piece) for i, piece in enumerate(pieces)]

    def chunks(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        told = piece.token_ids and (self.body.logprobs is not None or self.body.return_token_ids)
        if not (piece.text or piece.finish_reason or told):
            return []
        return [self._choice(i, piece)]

    def _choice(self, i: int, piece: Piece) -> dict[str, Any]:
        text, logprobs = piece.text, None
        if self.body.logprobs is not None:
            logprobs = text_logprobs(self._service, piece, self.body.logprobs)
        if self._echoes:
            before, of_prompt = self._echoes[i // self._n]
            text = before + text
            if logprobs is not None and of_prompt is not None:
                own = text_logprobs(self._service, piece, self.body.logprobs or 0, len(before))
                logprobs = {
                    name: None if values is None else values + (own[name] or [])
                    for name, values in of_prompt.items()
                }
        choice: dict[str, Any] = {
            "index": i, "text": text, "logprobs": logprobs, "finish_reason": piece.finish_reason,
        }  # fmt: skip
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if self.body.return_token_ids:
            choice |= {
                "token_ids": piece.token_ids, "prompt_token_ids": self._prompts[i // self._n],
            }  # fmt: skip
        return choice


def _offsets(tokenizer: Any, token_ids: list[int]) -> list[int]:
    """Where the text of each token begins in the text of all."""
    stream, offsets = TextStream(tokenizer), []
    for token in token_ids:
        offsets.append(stream.length)
        stream.push(token)
    return offsets
