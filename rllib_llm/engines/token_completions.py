"""Completions by a server that takes and gives tokens: its rows can be learnt from.

`POST /inference/v1/generate`, in vLLM's shape: token ids in; token ids, their log-probs and the
versions of the weights that sampled them out. `rllib serve` has it, and vLLM from 0.32 on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Ended, Finish, Noise
from rllib_llm.openai_client import OpenAIClient, server_root

PATH = "inference/v1/generate"
_LABEL = re.compile(r"(?:(\d+)\.)?(\d+)\Z")  # "2.31", or "step-31"


class TokenCompletions:
    """See `client.CompletionClient`.

    Args:
        base_url: of the server, with or without "/v1" at its end.
        served_model: the server's name for the model; None: its only one.
        follows_run: the server has the weights of the run that asks: a request waits for those
            that the run has published last, and an answer by others is asked for again.
        exact_noise: the server draws a run's own randomness, which ours does: completions are those
            that the run would have sampled itself. False: each has a seed.
        extra_params: further fields of every request's `sampling_params`.
        client: further arguments of `OpenAIClient`: timeout_s, max_attempts, api_key_env ...
    """

    def __init__(
        self,
        *,
        base_url: str,
        served_model: str | None = None,
        follows_run: bool = False,
        exact_noise: bool = True,
        extra_params: Mapping[str, Any] | None = None,
        **client: Any,
    ) -> None:
        self._served_model, self._follows_run = served_model, follows_run
        self._exact_noise, self._extra = exact_noise, dict(extra_params or {})
        # What is no text is refused by the client.
        root = server_root(base_url) if isinstance(base_url, str) else base_url
        self._client = OpenAIClient(root, **client)

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        noise: Noise,
        weights: tuple[int, int] | None = None,
    ) -> Future[Ended]:
        """Starts a completion. The future raises RequestRefusedError or ServerError where there is
        no answer."""
        asked = weights if self._follows_run else None
        sampling: dict[str, Any] = {
            "max_tokens": params.max_new_tokens,
            "min_tokens": params.min_new_tokens,
            **params.drawn_by,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,  # the policy's own are among the stop tokens
            "logprobs": 0,
            **self._noise(noise),
            **self._extra,
        }
        body: dict[str, Any] = {"token_ids": list(token_ids), "sampling_params": sampling}
        if self._served_model is not None:
            body["model"] = self._served_model
        headers = None if asked is None else {"X-Min-Weight-Version": f"{asked[0]}.{asked[1]}"}
        return self._client.submit(PATH, body, partial(_read, params, asked), headers)

    def _noise(self, noise: Noise) -> dict[str, int]:
        if not self._exact_noise:
            return {"seed": noise.one_seed}
        return {"seed": noise.seed, "noise_row": noise.row, "noise_turn": noise.turn}

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()


def _read(params: SamplingParams, asked: tuple[int, int] | None, answer: Any) -> Ended:
    """The completion in an answer.

    Raises:
        ValueError: it is cut off, its parts do not fit, or other weights sampled it.
    """
    choice = answer["choices"][0]
    ids, entries = [int(i) for i in choice["token_ids"]], choice["logprobs"]["content"]
    if choice["finish_reason"] not in ("stop", "length") or not ids:
        raise ValueError(f"finish_reason={choice['finish_reason']!r} with {len(ids)} tokens")
    logprobs = [float(entry["logprob"]) for entry in entries]
    if [_token_of(entry) for entry in entries] != ids or not all(map(math.isfinite, logprobs)):
        raise ValueError("the log-probs are not those of the tokens")
    versions = _versions(choice["weight_versions"], len(ids), asked)
    finish: Finish = "stop" if ids[-1] in params.stop_token_ids else "length"
    return Ended(None, ids, logprobs, versions, finish)


def _token_of(entry: Any) -> int:
    """The token that an entry is about, in either of vLLM's shapes."""
    return int(entry.get("token_id", str(entry.get("token", "")).removeprefix("token_id:")))


def _versions(spans: Any, count: int, asked: tuple[int, int] | None) -> list[int]:
    """The version of each token, from spans [{version, start, end}].

    Raises:
        ValueError: they do not cover the tokens, or name other weights than those asked for.
    """
    versions: list[int] = []
    for span in spans:
        epoch, version = read_label(span["version"])
        if span["start"] != len(versions):
            raise ValueError(f"weight_versions={spans} do not cover the tokens")
        if asked is not None and (version != asked[1] or epoch not in (None, asked[0])):
            raise ValueError(f"weights {span['version']} sampled it, not {asked[0]}.{asked[1]}")
        versions += [version] * (span["end"] - span["start"])
    if len(versions) != count:
        raise ValueError(f"weight_versions={spans} do not cover {count} tokens")
    return versions


def read_label(label: Any) -> tuple[int | None, int]:
    """The epoch, if there is one, and the version that a server's label names.

    Raises:
        ValueError: it names none.
    """
    found = _LABEL.search(str(label))
    if found is None:
        raise ValueError(f"weight version {label!r} has no number at its end")
    epoch, version = found.groups()
    return None if epoch is None else int(epoch), int(version)
