"""What is sent of completions: the JSON of OpenAI's interface, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from rllib_llm.serving.choices import Piece
from rllib_llm.serving.running_job import RunningJob
from rllib_llm.serving.service import Service
from rllib_llm.serving.versions import Weights

_LOWEST = -9999.0  # JSON has no -inf


class Envelope:
    """What all answers and chunks of one request have in common.

    Args:
        service: that answers.
        running: the request in the engine; None: nothing was sampled.
        id: of the answer.
        kind: its `object`.
    """

    def __init__(self, service: Service, running: RunningJob | None, id: str, kind: str) -> None:
        self._service, self._running = service, running
        self._fixed = {"id": id, "object": kind, "created": int(time.time())}
        self._chunk: tuple[int, bytes, bytes] | None = None

    @property
    def weights(self) -> list[Weights]:
        """That have sampled so far."""
        return self._running.weights if self._running else [self._service.weights.newest]

    def holding(self, choices: list[dict[str, Any]], **further: Any) -> dict[str, Any]:
        """An answer with these choices."""
        weights = self.weights
        return {
            **self._fixed,
            "model": self._service.weights.id_of(weights[-1]),
            "system_fingerprint": f"fp_{weights[-1].fingerprint}",
            "choices": choices,
            "metadata": versions_told(weights),
            **further,
        }

    def chunk(self, choices: list[dict[str, Any]], **further: Any) -> bytes:
        """As `holding`, in JSON, for the many chunks of a stream: what is around the choices is the
        same in all of them, `further` too, and is written once for each version of the weights."""
        num_weights = self._running.num_weights if self._running else 0
        if self._chunk is None or self._chunk[0] != num_weights:
            whole = self.holding([], **further)
            names = list(whole)
            behind = names[names.index("choices") + 1 :]
            head = to_json({name: whole[name] for name in names if name not in behind})
            tail = to_json({name: whole[name] for name in behind})
            self._chunk = num_weights, head.removesuffix(b"[]}"), b"," + tail[1:]
        _, before, after = self._chunk
        return before + to_json(choices) + after


def versions_told(weights: Sequence[Weights]) -> dict[str, str]:
    """The weights that have sampled an answer: the last of them, and all in their order, with a
    comma between them (OpenAI's metadata are texts)."""
    return {
        "weight_version": weights[-1].label,
        "weight_versions": ",".join(each.label for each in weights),
    }


def usage(prompts: Sequence[Sequence[int]], completion_tokens: int) -> dict[str, int]:
    """The tokens of a request."""
    prompt_tokens = sum(map(len, prompts))
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def chat_logprobs(service: Service, piece: Piece, top: int) -> dict[str, Any]:
    """`logprobs` of a chat's choice: an entry for each token, the stop token among them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, raw = service.texts.of(token)
        return {"token": text, "logprob": finite(logprob), "bytes": raw}

    content = []
    for i, (token, logprob) in enumerate(zip(piece.token_ids, piece.logprobs, strict=True)):
        likeliest = piece.likeliest[i][:top] if top else []
        content.append(
            {**entry(token, logprob), "top_logprobs": [entry(*each) for each in likeliest]}
        )
    return {"content": content, "refusal": None}


def text_logprobs(service: Service, piece: Piece, top: int, start: int = 0) -> dict[str, Any]:
    """`logprobs` of a text completion, whose text begins at character `start`."""
    names = [service.texts.of(token)[0] for token in piece.token_ids]
    return {
        "tokens": names,
        "token_logprobs": [finite(value) for value in piece.logprobs],
        "top_logprobs": [
            {service.texts.of(token)[0]: finite(value) for token, value in place[:top]}
            for place in piece.likeliest
        ]
        if top
        else None,
        "text_offset": [start + at for at in piece.offsets],
    }


def token_logprobs(piece: Piece, top: int) -> dict[str, Any]:
    """`logprobs` of /inference/v1/generate: entries that name tokens by text and by number, for
    clients of either of vLLM's shapes."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": f"token_id:{token}", "token_id": token, "logprob": finite(logprob)}

    return {
        "content": [
            {
                **entry(token, logprob),
                "top_logprobs": [
                    entry(*each) for each in (piece.likeliest[i][:top] if top else ())
                ],
            }
            for i, (token, logprob) in enumerate(zip(piece.token_ids, piece.logprobs, strict=True))
        ]
    }


def finite(logprob: float) -> float:
    """A log-prob as JSON takes it."""
    return max(_LOWEST, logprob)
