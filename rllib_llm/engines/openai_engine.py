"""A server with OpenAI's interface as an engine: completions by whatever model it serves.

For evaluation only: the server's weights are its own, and its tokens need not be the policy's, so
there is nothing to learn from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rllib_llm.engines.completions import Completions
from rllib_llm.engines.external_engine import pad_completions, prompts_of
from rllib_llm.engines.params import SamplingParams
from rllib_llm.modules.tokenizer import eos_token_ids, load_generation_config, load_tokenizer
from rllib_llm.openai_client import OpenAIClient


@dataclass(frozen=True)
class _Choice:
    """One completion as the server gave it."""

    text: str
    finished: bool
    logprobs: tuple[float, ...] | None


class OpenAIEngine:
    """See `ExternalEngine`; asks `<base_url>/completions` once per completion.

    Prompts travel as text, and the completion's text is cut into the policy's tokens, which is
    what the environment judges. Stop tokens, top_k and min_new_tokens are the server's business.

    Args:
        model: folder, hub id or dotted path of the policy, for its tokenizer.
        base_url: of the server, such as "http://localhost:8000/v1".
        served_model: the server's name for the model.
        extra_body: further keys of every request, such as {"top_k": 20}.
        client: further arguments of `OpenAIClient`: timeout_s, max_attempts, api_key_env ...
    """

    takes_weights = False

    def __init__(
        self,
        model: str,
        *,
        base_url: str,
        served_model: str,
        extra_body: dict[str, Any] | None = None,
        **client: Any,
    ) -> None:
        self.tokenizer = load_tokenizer(model)
        self.stop_token_ids = eos_token_ids(self.tokenizer, load_generation_config(model))
        self._served_model = served_model
        self._extra_body = dict(extra_body or {})
        self._client = OpenAIClient(base_url, **client)

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Raises TypeError: the server has weights of its own."""
        raise TypeError("engine='openai' must not be given weights: the server has its own.")

    def generate(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        params: SamplingParams,
        *,
        num_completions: int,
        seeds: list[int],
    ) -> Completions:
        """Completions of each prompt; log-probs are NaN where the server gave none that fit.

        Args: as `ExternalEngine.generate`.

        Raises:
            RequestRefusedError, ServerError: there is no answer to a request.
        """
        texts = [
            self.tokenizer.decode(row, skip_special_tokens=True)
            for row in prompts_of(prompt_ids, prompt_mask)
        ]
        rows = [text for text in texts for _ in range(num_completions)]
        requests = [
            self._client.submit("completions", self._body(text, params, seed), _read)
            for text, seed in zip(rows, seeds, strict=True)
        ]
        tokens, logprobs = [], []
        for request in requests:
            row, values = self._tokens(request.result(), params)
            tokens.append(row)
            logprobs.append(values)
        return pad_completions(tokens, logprobs, params)

    def _body(self, prompt: str, params: SamplingParams, seed: int) -> dict[str, Any]:
        return {
            "model": self._served_model,
            "prompt": prompt,
            "max_tokens": params.max_new_tokens,
            "temperature": 0.0 if params.greedy else params.temperature,
            "top_p": 1.0 if params.greedy else params.top_p,
            "seed": seed,
            "logprobs": 0,
            **self._extra_body,
        }

    def _tokens(self, choice: _Choice, params: SamplingParams) -> tuple[list[int], list[float]]:
        """The policy's tokens of a completion and their log-probs."""
        ids = self.tokenizer(choice.text, add_special_tokens=False)["input_ids"]
        ids = ids[: params.max_new_tokens]
        given = choice.logprobs
        fits = given is not None and len(given) in (len(ids), len(ids) + 1)
        stop = next(iter(params.stop_token_ids), params.pad_token_id)
        if not ids or (choice.finished and len(ids) < params.max_new_tokens):
            ids = [*ids, stop]
        values = list(given or ()) if fits else []
        return ids, (values + [float("nan")] * len(ids))[: len(ids)]

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()


def _read(answer: Any) -> _Choice:
    choice = answer["choices"][0]
    text = choice["text"]
    if not isinstance(text, str):
        raise TypeError(f"choices[0].text is a {type(text).__name__}")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    return _Choice(
        text,
        choice.get("finish_reason") == "stop",
        None if logprobs is None else tuple(float(value) for value in logprobs),
    )
