"""Clients that request completions from servers, singly and in batches."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Ended, Engine, Finish, Noise, Row
from rllib_llm.shared.errors import Problems, require
from rllib_llm.shared.openai_client import OpenAIClient, server_root


class CompletionClient(ABC):
    """Completions by a server, one by one or in batches, with the weights that it has.

    Args:
        client: asks it; closed with this.
        tokenizer, stop_token_ids: the policy's, with all its EOS ids.
    """

    takes_weights, has_weights = False, True
    knows_versions = True  # which weights sampled a token

    def __init__(
        self, client: OpenAIClient, tokenizer: Any, stop_token_ids: tuple[int, ...]
    ) -> None:
        self._client = client
        self.tokenizer, self.stop_token_ids = tokenizer, stop_token_ids

    @abstractmethod
    def submit(self, row: Row, weights: tuple[int, int] | None = None) -> Future[Ended]:
        """Starts a completion of a prompt, see `complete`. The future raises RequestRefusedError or
        ServerError where there is no answer."""

    def complete(self, rows: Sequence[Row], weights: tuple[int, int] | None) -> list[Ended]:
        """A completion of each prompt; the same noise gives the same one, where it can. `weights`:
        (epoch, version) of the run's newest, for a server that follows it."""
        started = [self.submit(row, weights) for row in rows]
        return [future.result() for future in started]

    def open_rows(self, version: int | None = None, load_weights: Any = None) -> Engine:
        """Raises ValueError: it cannot be asked row by row."""
        rule = "be 'torch' or 'vllm' for conversations"
        raise Problems("engine", rule, "a server is asked for whole batches", value="openai")

    def load_weights(self, weights: dict[str, Any]) -> None:  # noqa: B027
        """Does nothing: it has its own."""

    def close(self) -> None:
        """Closes its connections."""
        self._client.close()


# --- Completions by a server with OpenAI's interface: a client like that of an engine of our own

PROMPT_FORMATS = ("token_ids", "text")


class OpenAICompletions(CompletionClient):
    """Asks `<base_url>/completions` once per completion.

    Prompts travel as the policy's token ids, so that chat markup and special tokens arrive as they
    are. The completion's text is cut into the policy's tokens, which is what the environment
    judges, unless the answer has `token_ids` (vLLM's with extra_body={"return_token_ids": True}).
    Stop tokens, top_k and min_new_tokens are the server's business.

    Args:
        base_url: of the server, such as "http://localhost:8000/v1".
        prompt_format: "token_ids", for a server of a model with the policy's tokenizer; "text" for
            others, where prompts are plain text.
        extra_body: further keys of every request, such as {"top_k": 20}.
        client: further arguments of `OpenAIClient`: timeout_s, max_attempts, api_key_env ...

    Raises:
        ValueError: an unknown prompt format.
    """

    def __init__(
        self, tokenizer: Any, stop_token_ids: tuple[int, ...] = (), *, base_url: str,
        served_model: str, prompt_format: str = "token_ids",
        extra_body: dict[str, Any] | None = None, **client: Any,
    ) -> None:  # fmt: skip
        require(prompt_format in PROMPT_FORMATS, "engine_settings.prompt_format", prompt_format,
                f"be one of {PROMPT_FORMATS}")  # fmt: skip
        self._served_model, self._prompt_format = served_model, prompt_format
        self._extra_body = dict(extra_body or {})
        super().__init__(OpenAIClient(base_url, **client), tokenizer, stop_token_ids)

    def submit(self, row: Row, weights: tuple[int, int] | None = None) -> Future[Ended]:
        """Starts a completion; log-probs are NaN where the server gave none that fit.

        Raises:
            ValueError: a prompt with special tokens, where prompts travel as text.
        """
        params = row.params
        drawn_by = params.drawn_by
        drawn_by.pop("top_k")  # not OpenAI's
        body = {
            "model": self._served_model,
            "prompt": self._prompt(list(row.token_ids)),
            "max_tokens": params.max_new_tokens,
            **drawn_by,
            "seed": row.noise.one_seed,
            "logprobs": 0,
            **self._extra_body,
        }
        return self._client.submit("completions", body, partial(self._read, params))

    def _prompt(self, token_ids: list[int]) -> str | list[int]:
        if self._prompt_format == "token_ids":
            return token_ids
        if token_ids[0] == self.tokenizer.bos_token_id:  # which the server puts there itself
            token_ids = token_ids[1:]
        special = set(self.tokenizer.all_special_ids).intersection(token_ids)
        if special:
            names = self.tokenizer.convert_ids_to_tokens(sorted(special))
            rule, reason = "be 'token_ids' for chats", f"the special tokens {names} would vanish"
            raise Problems("engine_settings.prompt_format", rule, reason, value="text")
        return str(self.tokenizer.decode(token_ids))

    def _read(self, params: SamplingParams, answer: Any) -> Ended:
        choice = answer["choices"][0]
        text, token_ids = choice["text"], choice.get("token_ids")
        if not isinstance(text, str):
            raise TypeError(f"choices[0].text is a {type(text).__name__}")
        if token_ids is None:
            token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [int(i) for i in token_ids][: params.max_new_tokens]
        given = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        logprobs = [float(value) for value in given]
        if len(logprobs) not in (len(ids), len(ids) + 1):
            logprobs = []
        has_stop = bool(ids) and ids[-1] in params.stop_token_ids
        is_finished = choice.get("finish_reason") == "stop" and not has_stop
        if not ids or (is_finished and len(ids) < params.max_new_tokens):
            ids.append(next(iter(params.stop_token_ids), params.pad_token_id))
        logprobs = (logprobs + [math.nan] * len(ids))[: len(ids)]
        finish: Finish = "stop" if ids[-1] in params.stop_token_ids else "length"
        return Ended(None, ids, logprobs, [-1] * len(ids), finish)


# --- Completions by a server that takes and gives tokens: its rows can be learnt from

PATH = "inference/v1/generate"
_LABEL = re.compile(r"(?:(\d+)\.)?(\d+)\Z")  # "2.31", or "step-31"


class TokenCompletions(CompletionClient):
    """Asks for token ids, by vLLM's own interface.

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
        self, tokenizer: Any = None, stop_token_ids: tuple[int, ...] = (), *, base_url: str,
        served_model: str | None = None, follows_run: bool = False, exact_noise: bool = True,
        extra_params: Mapping[str, Any] | None = None, **client: Any,
    ) -> None:  # fmt: skip
        self._served_model, self._follows_run = served_model, follows_run
        self._exact_noise, self._extra = exact_noise, dict(extra_params or {})
        # What is no text is refused by the client.
        root = server_root(base_url) if isinstance(base_url, str) else base_url
        super().__init__(OpenAIClient(root, **client), tokenizer, stop_token_ids)

    def submit(self, row: Row, weights: tuple[int, int] | None = None) -> Future[Ended]:
        """See `CompletionClient`."""
        params, asked = row.params, weights if self._follows_run else None
        sampling: dict[str, Any] = {
            "max_tokens": params.max_new_tokens,
            "min_tokens": params.min_new_tokens,
            **params.drawn_by,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,  # the policy's own are among the stop tokens
            "logprobs": 0,
            **self._noise(row.noise),
            **self._extra,
        }
        body: dict[str, Any] = {"token_ids": list(row.token_ids), "sampling_params": sampling}
        if self._served_model is not None:
            body["model"] = self._served_model
        headers = None if asked is None else {"X-Min-Weight-Version": f"{asked[0]}.{asked[1]}"}
        return self._client.submit(PATH, body, partial(_read, params, asked), headers)

    def _noise(self, noise: Noise) -> dict[str, int]:
        if not self._exact_noise:
            return {"seed": noise.one_seed}
        return {"seed": noise.seed, "noise_row": noise.row, "noise_turn": noise.turn}


def _read(params: SamplingParams, asked: tuple[int, int] | None, answer: Any) -> Ended:
    """The completion in an answer."""
    choice = answer["choices"][0]
    ids, entries = [int(i) for i in choice["token_ids"]], choice["logprobs"]["content"]
    if choice["finish_reason"] not in ("stop", "length") or not ids:
        raise ValueError(f"finish_reason={choice['finish_reason']!r} with {len(ids)} tokens")
    logprobs = [float(entry["logprob"]) for entry in entries]
    # The token that an entry is about, in either of vLLM's shapes.
    tokens = [int(e.get("token_id", str(e.get("token", "")).removeprefix("token_id:")))
              for e in entries]  # fmt: skip
    if tokens != ids or not all(map(math.isfinite, logprobs)):
        raise ValueError("the log-probs are not those of the tokens")
    versions = _versions(choice["weight_versions"], len(ids), asked)
    finish: Finish = "stop" if ids[-1] in params.stop_token_ids else "length"
    return Ended(None, ids, logprobs, versions, finish)


def _versions(spans: Any, count: int, asked: tuple[int, int] | None) -> list[int]:
    """The version of each token, from spans [{version, start, end}]."""
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


ENDPOINTS = ("completions", "tokens")
"""Of a server: OpenAI's texts, for evaluation; token ids in and out, for training too."""


def open_server(model: str, *, endpoint: str = "completions", **settings: Any) -> CompletionClient:
    """Completions by a server.

    Args:
        model: folder, hub id or dotted path of the policy, for its tokenizer.
        endpoint: one of `ENDPOINTS`.
        settings: of `OpenAICompletions` or `TokenCompletions`.

    Raises:
        ValueError: an unknown endpoint.
    """
    # Here, since transformers would make importing the package slow.
    from rllib_llm.modules.tokenizer import load_tokenizer, policy_eos_ids

    require(endpoint in ENDPOINTS, "engine_settings.endpoint", endpoint, f"be one of {ENDPOINTS}")
    tokenizer = load_tokenizer(model)
    kind = TokenCompletions if endpoint == "tokens" else OpenAICompletions
    return kind(tokenizer, policy_eos_ids(model, tokenizer), **settings)
