"""Servers as engines: a request for each row, and the answers in the order in which they come."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar

import torch

from rllib_llm.engines.protocol import (
    Ended,
    Engine,
    Finish,
    InFlight,
    Row,
    Tokens,
    check_rows,
)
from rllib_llm.shared.errors import Problem, Problems, require
from rllib_llm.shared.openai_client import OpenAIClient, server_root


class ServerEngine(Engine):
    """Completions by a server with the weights that it has.

    Args:
        client: asks it; closed with this.
    """

    takes_weights, takes_rows, knows_versions = False, False, True
    needed: ClassVar[tuple[str, ...]] = ("base_url",)  # of the settings
    version = 0

    def __init__(self, client: OpenAIClient) -> None:
        self._client = client
        self._running: dict[Future[Ended], Hashable] = {}
        self._answered: SimpleQueue[Future[Ended]] = SimpleQueue()

    @classmethod
    def rules(cls, config: Any) -> Iterator[Problem]:
        given = dict(config.engine_settings or {})
        name, endpoint = config.engine, given.get("endpoint", "completions")
        kind = ENDPOINTS.get(endpoint)
        if kind is None:
            yield Problem("engine_settings.endpoint", f"be one of {tuple(ENDPOINTS)}",
                          value=endpoint)  # fmt: skip
            return
        if missing := set(kind.needed) - set(given):
            yield Problem("engine_settings",
                          f"be a dictionary with {' and '.join(map(repr, kind.needed))}",
                          "they say which server and which of its models answers",
                          f"Add {sorted(missing)}", config.engine_settings)  # fmt: skip
        if config.in_evaluation:
            return
        if not kind.has_logprobs:
            yield Problem("engine", "be another in training, or come with endpoint='tokens' of its "
                          "engine_settings", "texts are not the tokens that a server sampled, so "
                          "nothing can be learnt from them", "Add endpoint: tokens, or set it in "
                          "evaluation_config alone", name)  # fmt: skip
        if not (config.gives_weights_away and given.get("follows_run", True)):
            yield Problem("engine", "be another in training, or come with weights_name or "
                          "weights_push", "the server has to have the weights that are learnt",
                          "Set weights_name, and serve with the same one, and leave follows_run "
                          "out", name)  # fmt: skip
        yield from super().rules(config)

    @classmethod
    def of(cls, config: Any) -> Engine:
        """The client of the endpoint that `engine_settings` name; one of tokens follows the run
        whose weights it is given."""
        # Here, since transformers would make importing the package slow.
        from rllib_llm.modules.tokenizer import load_tokenizer

        settings = dict(config.engine_settings or {})
        if settings.pop("endpoint", "completions") == "tokens":
            return TokenCompletions(**{"follows_run": config.gives_weights_away, **settings})
        return OpenAICompletions(load_tokenizer(config.pretrained_model), **settings)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @abstractmethod
    def submit(self, row: Row) -> Future[Ended]:
        """Starts a completion. The future raises RequestRefusedError or ServerError where there is
        no answer."""

    def add(self, rows: Sequence[Row]) -> None:
        check_rows(rows, self._running.values(), self.version)
        started = {self.submit(row): row.id for row in rows}
        self._running |= started
        for future in started:
            future.add_done_callback(self._answered.put)

    def step(self) -> list[Ended]:
        """Waits for an answer; hands back all that are there.

        Raises:
            RequestRefusedError, ServerError: there is none for a row; all rows are dropped.
        """
        answered = [self._answered.get()]
        while not self._answered.empty():
            answered.append(self._answered.get())
        try:
            return [each.result() for each in answered if self._running.pop(each, None) is not None]
        except BaseException:
            self.abort(list(self._running.values()))
            raise

    def sampled(self, ids: Sequence[Hashable], starts: Sequence[int]) -> list[Tokens]:
        """None of any: they come with the answer."""
        return [Tokens([], [], []) for _ in ids]

    def abort(self, ids: Sequence[Hashable]) -> list[Ended]:
        out = {future: row_id for future, row_id in self._running.items() if row_id in set(ids)}
        for future in out:
            del self._running[future]
            future.cancel()
        return [Ended(row_id, [], [], [], "aborted") for row_id in out.values()]

    def load(
        self, weights: dict[str, torch.Tensor], version: int, in_flight: InFlight = "finish"
    ) -> None:
        """Does nothing: it has its own."""

    def close(self) -> None:
        """Closes its connections."""
        self._client.close()


# --- Completions by a server with OpenAI's interface

PROMPT_FORMATS = ("token_ids", "text")


class OpenAICompletions(ServerEngine):
    """Asks `<base_url>/completions` once per completion.

    Prompts travel as the policy's token ids, so that chat markup and special tokens arrive as they
    are. The completion's text is cut into the policy's tokens, which is what the environment
    judges, unless the answer has `token_ids` (vLLM's with extra_body={"return_token_ids": True}).
    Stop tokens, top_k and min_new_tokens are the server's business.

    Args:
        tokenizer: the policy's.
        base_url: of the server, such as "http://localhost:8000/v1".
        prompt_format: "token_ids", for a server of a model with the policy's tokenizer; "text" for
            others, where prompts are plain text.
        extra_body: further keys of every request, such as {"top_k": 20}.
        client: further arguments of `OpenAIClient`: timeout_s, max_attempts, api_key_env ...

    Raises:
        ValueError: an unknown prompt format.
    """

    needed, has_logprobs = ("base_url", "served_model"), False

    def __init__(
        self, tokenizer: Any, *, base_url: str, served_model: str,
        prompt_format: str = "token_ids", extra_body: dict[str, Any] | None = None, **client: Any,
    ) -> None:  # fmt: skip
        require(prompt_format in PROMPT_FORMATS, "engine_settings.prompt_format", prompt_format,
                f"be one of {PROMPT_FORMATS}")  # fmt: skip
        self._served_model, self._prompt_format = served_model, prompt_format
        self._extra_body = dict(extra_body or {})
        self.tokenizer = tokenizer
        super().__init__(OpenAIClient(base_url, **client))

    def submit(self, row: Row) -> Future[Ended]:
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
        return self._client.submit("completions", body, partial(self._read, row))

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

    def _read(self, row: Row, answer: Any) -> Ended:
        choice, params = answer["choices"][0], row.params
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
        return Ended(row.id, ids, logprobs, [-1] * len(ids), finish)


# --- Completions by a server that takes and gives tokens: its rows can be learnt from

PATH = "inference/v1/generate"
_LABEL = re.compile(r"(?:(\d+)\.)?(\d+)\Z")  # "2.31", or "step-31"


class TokenCompletions(ServerEngine):
    """Asks for token ids, by vLLM's own interface.

    Args:
        base_url: of the server, with or without "/v1" at its end.
        served_model: the server's name for the model; None: its only one.
        follows_run: the server has the weights of the run that asks: a request waits for those
            that the run has published last, and an answer by others is asked for again.
        exact_noise: the server draws a run's own randomness, which ours does: completions are those
            that the run would have sampled itself. False: each has a seed.
        adapters: the name under which the run pushes its adapters to the server (`name` of
            `weights_push`): each request asks for those of the newest version.
        extra_params: further fields of every request's `sampling_params`.
        client: further arguments of `OpenAIClient`: timeout_s, max_attempts, api_key_env ...
    """

    def __init__(
        self, *, base_url: str, served_model: str | None = None, follows_run: bool = False,
        exact_noise: bool = True, adapters: str | None = None,
        extra_params: Mapping[str, Any] | None = None, **client: Any,
    ) -> None:  # fmt: skip
        self._served_model, self._follows_run = served_model, follows_run
        self._adapters = adapters
        self._exact_noise, self._extra = exact_noise, dict(extra_params or {})
        # What is no text is refused by the client.
        root = server_root(base_url) if isinstance(base_url, str) else base_url
        super().__init__(OpenAIClient(root, **client))

    def submit(self, row: Row) -> Future[Ended]:
        params, asked = row.params, row.published if self._follows_run else None
        noise = {"seed": row.noise.one_seed}
        if self._exact_noise:
            own = row.noise
            noise = {"seed": own.seed, "noise_row": own.row, "noise_turn": own.turn}
        sampling: dict[str, Any] = {
            "max_tokens": params.max_new_tokens,
            "min_tokens": params.min_new_tokens,
            **params.drawn_by,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,  # the policy's own are among the stop tokens
            "logprobs": 0,
            **noise,
            **self._extra,
        }
        body: dict[str, Any] = {"token_ids": list(row.token_ids), "sampling_params": sampling}
        if self._adapters is not None and asked is not None:
            body["model"] = f"{self._adapters}@{asked[0]}.{asked[1]}"
        elif self._served_model is not None:
            body["model"] = self._served_model
        headers = None if asked is None else {"X-Min-Weight-Version": f"{asked[0]}.{asked[1]}"}
        read = partial(_read, row, asked, has_adapters=self._adapters is not None)
        return self._client.submit(PATH, body, read, headers)


def _read(row: Row, asked: tuple[int, int] | None, answer: Any, *, has_adapters: bool) -> Ended:
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
    spans = choice["weight_versions"]
    if has_adapters:  # the spans are of the trunk's weights
        spans = [{"version": answer["model"], "start": 0, "end": len(ids)}]
    versions = _versions(spans, len(ids), asked)
    finish: Finish = "stop" if ids[-1] in row.params.stop_token_ids else "length"
    return Ended(row.id, ids, logprobs, versions, finish)


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


ENDPOINTS: dict[Any, type[ServerEngine]] = {
    "completions": OpenAICompletions, "tokens": TokenCompletions,
}  # fmt: skip
"""Of a server: OpenAI's texts, for evaluation; token ids in and out, for training too."""
