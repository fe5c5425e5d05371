"""Completions by a server with OpenAI's interface: a client like that of an engine of our own.

For evaluation only: the server's weights are its own, and its tokens need not be the policy's, so
there is nothing to learn from. `token_completions.py` is for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Ended, Finish, Noise
from rllib_llm.openai_client import OpenAIClient

PROMPT_FORMATS = ("token_ids", "text")


@dataclass(frozen=True)
class _Choice:
    """One completion as the server gave it."""

    text: str
    finished: bool
    logprobs: tuple[float, ...] | None
    token_ids: tuple[int, ...] | None


class OpenAICompletions:
    """See `client.CompletionClient`; asks `<base_url>/completions` once per completion.

    Prompts travel as the policy's token ids, so that chat markup and special tokens arrive as they
    are. The completion's text is cut into the policy's tokens, which is what the environment
    judges, unless the answer has `token_ids` (vLLM's with extra_body={"return_token_ids": True}).
    Stop tokens, top_k and min_new_tokens are the server's business.

    Args:
        tokenizer: the policy's.
        base_url: of the server, such as "http://localhost:8000/v1".
        served_model: the server's name for the model.
        prompt_format: "token_ids", for a server of a model with the policy's tokenizer; "text" for
            others, where prompts are plain text.
        extra_body: further keys of every request, such as {"top_k": 20}.
        client: further arguments of `OpenAIClient`: timeout_s, max_attempts, api_key_env ...

    Raises:
        ValueError: an unknown prompt format.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        base_url: str,
        served_model: str,
        prompt_format: str = "token_ids",
        extra_body: dict[str, Any] | None = None,
        **client: Any,
    ) -> None:
        if prompt_format not in PROMPT_FORMATS:
            raise ValueError(
                f"engine_settings['prompt_format']={prompt_format!r} must be one of "
                f"{PROMPT_FORMATS}: prompts travel in no other way. Use 'token_ids'."
            )
        self._tokenizer = tokenizer
        self._served_model, self._prompt_format = served_model, prompt_format
        self._extra_body = dict(extra_body or {})
        self._client = OpenAIClient(base_url, **client)

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        noise: Noise,
        weights: tuple[int, int] | None = None,
    ) -> Future[Ended]:
        """Starts a completion; log-probs are NaN where the server gave none that fit.

        The future raises RequestRefusedError or ServerError where there is no answer.

        Raises:
            ValueError: a prompt with special tokens, where prompts travel as text.
        """
        drawn_by = params.drawn_by
        body = {
            "model": self._served_model,
            "prompt": self._prompt(list(token_ids)),
            "max_tokens": params.max_new_tokens,
            "temperature": drawn_by["temperature"],
            "top_p": drawn_by["top_p"],
            "seed": noise.one_seed,
            "logprobs": 0,
            **self._extra_body,
        }
        return self._client.submit("completions", body, partial(self._read, params))

    def _prompt(self, token_ids: list[int]) -> str | list[int]:
        if self._prompt_format == "token_ids":
            return token_ids
        if token_ids[0] == self._tokenizer.bos_token_id:  # which the server puts there itself
            token_ids = token_ids[1:]
        special = set(self._tokenizer.all_special_ids).intersection(token_ids)
        if special:
            raise ValueError(
                "engine_settings['prompt_format']='text' must be used with prompts of plain text: "
                f"special tokens {self._tokenizer.convert_ids_to_tokens(sorted(special))} of chat "
                "markup would vanish. Use 'token_ids' and a server of the policy's tokenizer."
            )
        return str(self._tokenizer.decode(token_ids))

    def _read(self, params: SamplingParams, answer: Any) -> Ended:
        choice = _choice(answer)
        ids, logprobs = self._tokens(choice, params)
        finish: Finish = "stop" if ids[-1] in params.stop_token_ids else "length"
        return Ended(None, ids, logprobs, [-1] * len(ids), finish)

    def _tokens(self, choice: _Choice, params: SamplingParams) -> tuple[list[int], list[float]]:
        """The policy's tokens of a completion and their log-probs."""
        if choice.token_ids is None:
            ids = self._tokenizer(choice.text, add_special_tokens=False)["input_ids"]
        else:
            ids = list(choice.token_ids)
        ids = ids[: params.max_new_tokens]
        given = choice.logprobs
        fits = given is not None and len(given) in (len(ids), len(ids) + 1)
        stop = next(iter(params.stop_token_ids), params.pad_token_id)
        has_stop = bool(ids) and ids[-1] in params.stop_token_ids
        ends = choice.finished and len(ids) < params.max_new_tokens and not has_stop
        if not ids or ends:
            ids = [*ids, stop]
        values = list(given or ()) if fits else []
        return ids, (values + [float("nan")] * len(ids))[: len(ids)]

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()


def _choice(answer: Any) -> _Choice:
    choice = answer["choices"][0]
    text = choice["text"]
    if not isinstance(text, str):
        raise TypeError(f"choices[0].text is a {type(text).__name__}")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    token_ids = choice.get("token_ids")
    return _Choice(
        text,
        choice.get("finish_reason") == "stop",
        None if logprobs is None else tuple(float(value) for value in logprobs),
        None if token_ids is None else tuple(int(i) for i in token_ids),
    )
