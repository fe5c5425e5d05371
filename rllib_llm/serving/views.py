"""Completions as OpenAI shows them, and vLLM's route of tokens: the JSON of whole answers and of
chunks."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.data.decoding import TextStream
from rllib_llm.engines.torch_engine import TextScores
from rllib_llm.serving import chat
from rllib_llm.serving.schemas import ChatRequest, CompletionRequest, GenerateRequest
from rllib_llm.serving.service import RunningJob, Service
from rllib_llm.serving.streams import CompletionPiece
from rllib_llm.serving.tool_grammars import forced_syntax

_LOWEST = -9999.0  # JSON has no -inf


# --- log-probs -----------------------------------------------------------------------------------


def finite(logprob: float) -> float | None:
    """A log-prob as JSON takes it; None where it is unknown, as of a text's first token."""
    return None if math.isnan(logprob) else max(_LOWEST, logprob)


def chat_logprobs(service: Service, piece: CompletionPiece, top: int) -> dict[str, Any]:
    """`logprobs` of a chat's choice: an entry for each token, the stop token among them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, raw = service.texts.of(token)
        return {"token": text, "logprob": finite(logprob), "bytes": raw}

    return {"content": _entries(piece, top, entry), "refusal": None}


def _entries(
    piece: CompletionPiece, top: int, entry: Callable[[int, float], dict[str, Any]]
) -> list[dict[str, Any]]:
    """An entry for each token of a piece, in which the likeliest stand."""
    found = []
    for i, (token, logprob) in enumerate(zip(piece.token_ids, piece.logprobs, strict=True)):
        likeliest = piece.likeliest[i][:top] if top else []
        found.append({**entry(token, logprob), "top_logprobs": [entry(*one) for one in likeliest]})
    return found


def text_logprobs(
    service: Service, piece: CompletionPiece, top: int, start: int = 0
) -> dict[str, Any]:
    """`logprobs` of a text completion whose text begins at character `start`."""

    def name(token: int) -> str:
        text, raw = service.texts.of(token)
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


def token_logprobs(piece: CompletionPiece, top: int) -> dict[str, Any]:
    """`logprobs` of /inference/v1/generate: entries that name tokens by text and by number, for
    clients of either of vLLM's shapes."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": f"token_id:{token}", "token_id": token, "logprob": finite(logprob)}

    return {"content": _entries(piece, top, entry)}


def prompt_logprobs(
    service: Service, prompt: Sequence[int], scores: TextScores
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: at each place of a prompt its token and the likeliest, by number;
    nothing at the first."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = service.texts.of(token)[0]
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    told: list[dict[str, dict[str, Any]] | None] = [None]
    for token, logprob, rank, likeliest in zip(
        prompt[1:], scores.logprobs, scores.ranks, scores.likeliest, strict=True
    ):
        place = {str(token): entry(token, logprob, rank)}
        for i, (other, value) in enumerate(likeliest, start=1):
            place.setdefault(str(other), entry(other, value, i))
        told.append(place)
    return told


def _ended(
    piece: CompletionPiece, finish: str | None, logprobs: Any, prompt: list[int] | None
) -> dict[str, Any]:
    """The end of a choice. prompt: its token ids, where they are returned."""
    ended: dict[str, Any] = {"logprobs": logprobs, "finish_reason": finish}
    if finish is not None:
        ended["stop_reason"] = piece.stop_reason
    if prompt is not None:
        ended |= {"token_ids": piece.token_ids, "prompt_token_ids": prompt}
    return ended


class View:
    """Completions as one route shows them. names: of the answer, such as its id.

    `running`, the request in the engine, and `scores` of its prompts, where they are asked for, are
    set before anything is shown. `on_piece` is told what comes.
    """

    running: RunningJob
    scores: Sequence[TextScores] = ()
    on_piece: Callable[[CompletionPiece], None] | None = None

    def __init__(self, service: Service, names: Mapping[str, Any]) -> None:
        self._service, self._names = service, names

    def holding(self, choices: list[dict[str, Any]], **further: Any) -> dict[str, Any]:
        """An answer, or a chunk of it, with these choices."""
        weights = self.running.weights
        return {
            **self._names,
            "model": self._service.weights.id_of(weights[-1]),
            "system_fingerprint": f"fp_{weights[-1].fingerprint}",
            "choices": choices,
            "metadata": {  # the last that has sampled, and all of them: texts, as OpenAI's are
                "weight_version": weights[-1].label,
                "weight_versions": ",".join(each.label for each in weights),
            },
            **further,
        }

    @property
    def usage(self) -> dict[str, int]:
        """The tokens of the request."""
        prompt_tokens = sum(map(len, self.running.job.prompts))
        completion_tokens = self.running.num_completion_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    @property
    def further(self) -> dict[str, Any]:
        """Fields of the response besides its choices."""
        return {}

    def choices(self, pieces: Sequence[CompletionPiece]) -> list[dict[str, Any]]:
        """The choices of a complete response."""
        return [choice for i, piece in enumerate(pieces) for choice in self.chunks(i, piece)]

    def before(self) -> list[dict[str, Any]]:
        """Chunks that come before anything is sampled."""
        return []

    def chunks(self, i: int, piece: CompletionPiece) -> list[dict[str, Any]]:
        """The chunks of a stream for a piece of choice `i`."""
        raise NotImplementedError


# --- chats ---------------------------------------------------------------------------------------


class ChatView(View):
    """A chat's completions as OpenAI shows them. With tools a turn is shown when it is whole:
    before, nobody knows what is a call."""

    def __init__(
        self, service: Service, body: ChatRequest, request_id: str, chat_format: ChatFormat,
        prompt: list[int],
    ) -> None:  # fmt: skip
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        names = {"id": f"chatcmpl-{request_id}", "object": kind, "created": int(time.time())}
        super().__init__(service, names)
        self.body, self.format, self.prompt = body, chat_format, prompt
        self.is_forced = body.tool_choice not in (None, "none", "auto")
        self.has_tools = bool(body.tools) and body.tool_choice != "none"
        self._syntax = forced_syntax(chat_format) if self.is_forced else None
        self._call_ids: defaultdict[tuple[int, int], str] = defaultdict(chat.new_call_id)
        self._begun: set[int] = set()
        self._held: dict[int, CompletionPiece] = {}

    @property
    def further(self) -> dict[str, Any]:
        if not self.scores:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._service, self.prompt, self.scores[0])}

    def choices(self, pieces: Sequence[CompletionPiece]) -> list[dict[str, Any]]:
        found = []
        for i, piece in enumerate(pieces):
            message, finish = self.message(i, piece)
            message = {**message, "refusal": None}
            found.append({"index": i, "message": message, **self._end(piece, finish)})
        return found

    def message(self, i: int, piece: CompletionPiece) -> tuple[dict[str, Any], str | None]:
        """The message of choice `i`, and why it ended."""
        if not self.has_tools or isinstance(piece.stop_reason, str):
            return {"role": "assistant", "content": piece.text}, piece.finish_reason
        return chat.assistant_message(
            self.format, piece.token_ids, self.prompt, piece.finish_reason,
            lambda call: self._call_ids[i, call], self._syntax,
            1 if self.body.parallel_tool_calls is False else None,
        )  # fmt: skip

    def _end(self, piece: CompletionPiece, finish: str | None) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs:
            logprobs = chat_logprobs(self._service, piece, self.body.top_logprobs or 0)
        return _ended(piece, finish, logprobs, self.prompt if self.body.return_token_ids else None)

    def chunks(self, i: int, piece: CompletionPiece) -> list[dict[str, Any]]:
        if self.has_tools:
            held = self._held.setdefault(i, CompletionPiece())
            held.add(piece)
            if piece.finish_reason is None:
                return []
            piece, (delta, finish) = held, self.message(i, held)
            if "tool_calls" in delta:
                calls = enumerate(delta["tool_calls"])
                delta["tool_calls"] = [{"index": k, **call} for k, call in calls]
        else:
            told = piece.token_ids and (self.body.logprobs or self.body.return_token_ids)
            if not (piece.text or piece.finish_reason or told):
                return []
            delta, finish = {"content": piece.text}, piece.finish_reason
        if i not in self._begun:
            self._begun.add(i)
            delta = {"role": "assistant", **delta}
        return [{"index": i, "delta": delta, **self._end(piece, finish)}]


# --- texts ---------------------------------------------------------------------------------------


class TextView(View):
    """Text completions as OpenAI shows them."""

    def __init__(
        self, service: Service, body: CompletionRequest, request_id: str, prompts: list[list[int]]
    ) -> None:
        names = {"id": f"cmpl-{request_id}", "object": "text_completion"}
        super().__init__(service, {**names, "created": int(time.time())})
        self._body, self._prompts = body, prompts
        self._n = body.n or 1
        self._echoes: list[str] = []
        if body.echo:
            decode = service.tokenizer.decode
            self._echoes = [decode(prompt, skip_special_tokens=True) for prompt in prompts]

    def choices(self, pieces: Sequence[CompletionPiece]) -> list[dict[str, Any]]:
        """The choices of a complete response, in which the echoed prompt and the completion are one
        text."""
        found = []
        for at, prompt in enumerate(self._prompts):
            further, echo = {}, self._echo(at) if self._echoes else None
            if self._body.prompt_logprobs is not None:
                told = prompt_logprobs(self._service, prompt, self.scores[at])
                further = {"prompt_logprobs": told}
            for i in range(at * self._n, (at + 1) * self._n):
                choice = self._choice(i, pieces[i]) | further
                if echo is not None:
                    choice["text"] = echo["text"] + choice["text"]
                    for name, values in (choice["logprobs"] or {}).items():
                        if (first := echo["logprobs"][name]) is not None:
                            choice["logprobs"][name] = [*first, *(values or [])]
                found.append(choice)
        return found

    def before(self) -> list[dict[str, Any]]:
        """Chunks sent before sampling starts: the echoed prompt."""
        echoes = [self._echo(at) for at in range(len(self._echoes))]
        return [{"index": i, **echoes[i // self._n]} for i in range(len(echoes) * self._n)]

    def chunks(self, i: int, piece: CompletionPiece) -> list[dict[str, Any]]:
        told = piece.token_ids and (self._body.logprobs is not None or self._body.return_token_ids)
        if not (piece.text or piece.finish_reason or told):
            return []
        return [self._choice(i, piece)]

    def _choice(self, i: int, piece: CompletionPiece) -> dict[str, Any]:
        at, logprobs = i // self._n, None
        if self._body.logprobs is not None:
            start = len(self._echoes[at]) if self._echoes else 0
            logprobs = text_logprobs(self._service, piece, self._body.logprobs, start)
        prompt = self._prompts[at] if self._body.return_token_ids else None
        ended = _ended(piece, piece.finish_reason, logprobs, prompt)
        return {"index": i, "text": piece.text, **ended}

    def _echo(self, at: int) -> dict[str, Any]:
        """Prompt `at` as its choices echo it."""
        told = None
        if self._body.logprobs is not None:
            ids, scores = self._prompts[at], self.scores[at]
            logprobs, likeliest = [math.nan, *scores.logprobs], [[], *scores.likeliest]
            stream, offsets = TextStream(self._service.tokenizer), []
            for token in ids:
                offsets.append(stream.length)
                stream.push(token)
            prompt = CompletionPiece("", ids, logprobs, likeliest, offsets=offsets)
            told = text_logprobs(self._service, prompt, self._body.logprobs)
        return {"text": self._echoes[at], "logprobs": told, "finish_reason": None}


# --- tokens --------------------------------------------------------------------------------------


class TokenView(View):
    """Completions as vLLM's /inference/v1/generate shows them."""

    def __init__(self, service: Service, body: GenerateRequest, request_id: str) -> None:
        super().__init__(service, {"request_id": request_id})
        self._body = body

    @property
    def further(self) -> dict[str, Any]:
        prompt = self._body.token_ids
        told = prompt_logprobs(self._service, prompt, self.scores[0]) if self.scores else None
        returned = prompt if self._body.return_token_ids else None
        return {"prompt_token_ids": returned, "prompt_logprobs": told}

    def chunks(self, i: int, piece: CompletionPiece) -> list[dict[str, Any]]:
        top = self._body.sampling_params.logprobs
        choice: dict[str, Any] = {
            "index": i,
            "token_ids": piece.token_ids,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            "logprobs": None if top is None else token_logprobs(piece, top),
        }
        if piece.finish_reason is not None:
            choice["weight_versions"] = [
                {"version": self._service.weights.of(serial).label, "start": start, "end": end}
                for serial, start, end in self.running.choices[i].spans
            ]
        if self._body.output_mode == "text":
            choice["text"] = piece.text
        return [choice]
