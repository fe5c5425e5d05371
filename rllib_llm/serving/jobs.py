"""Requests as jobs of the engine, the limits of what they may ask (what is above them is refused by
an `ApiError` that names the field), and the pieces that completions come in.

fields of a request ── Limits.job ──▶ Job ──▶ rows of the engine ──▶ tokens ── Choice ──▶ Piece
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rllib_llm.data.decoding import TextStream
from rllib_llm.engines.params import LOWEST_TEMPERATURE, SamplingParams
from rllib_llm.engines.protocol import Ended, Likeliest, Noise, Row, Tokens
from rllib_llm.serving.schemas import MAX_LOGPROBS, ApiError, SamplingFields, refuse

_CHARS_PER_TOKEN = 16


@dataclass(frozen=True)
class Job:
    """Completions of some prompts, `n` of each, under the same settings."""

    prompts: list[list[int]]
    params: SamplingParams
    """Of the longest: `max_tokens` has each prompt's own."""
    max_tokens: list[int]
    n: int = 1
    seed: int = 0
    noise_row: int = 0
    """Of the first completion: with seed and turn it names the randomness (`protocol.Noise`)."""
    noise_turn: int = 0
    stops: tuple[str, ...] = ()
    keeps_stop: bool = False
    version: int | None = None
    """Serial number of the weights; None: the newest."""
    continues_text: bool = False
    """Whether completions go on with the text of their prompts."""
    grammar: str | None = None
    grammar_field: str = ""
    """That the completions keep to."""
    prompt_logprobs: int | None = None
    """How many of the likeliest tokens are told at each place of the prompts; None: none is."""
    samples: bool = True
    """Whether anything is sampled; else the prompts are only scored."""
    eos_token_ids: tuple[int, ...] = ()
    images: Sequence[Mapping[str, Tensor]] = ()
    """What each prompt shows, as the model takes it; () of texts."""
    conversation: Hashable | None = None
    """Whose KV cache is kept for its next turn; see `protocol.Row`."""

    @property
    def num_rows(self) -> int:
        """Places that it takes: of completions, and of texts that are scored."""
        sampled = len(self.prompts) * self.n if self.samples else 0
        return sampled + (0 if self.prompt_logprobs is None else len(self.prompts))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompts."""
        return sum(map(len, self.prompts))

    @property
    def most_tokens(self) -> int:
        """Tokens that it takes at most: of its prompts, and of its completions."""
        return self.prompt_tokens + sum(self.max_tokens) * self.n * self.samples

    def rows(self) -> list[Row]:
        """Its completions as rows of the engine."""
        rows = []
        for i, prompt in enumerate(self.prompts if self.samples else ()):
            params = replace(self.params, max_new_tokens=self.max_tokens[i])
            group = object() if self.n > 1 else None
            for k in range(self.n):
                noise = Noise(self.seed, self.noise_row + i * self.n + k, self.noise_turn)
                rows.append(
                    Row(None, prompt, params, 0, noise, group, self.version, None,
                        self.conversation, images=self.images[i] if self.images else {})
                )  # fmt: skip
        return rows


@dataclass(frozen=True)
class Limits:
    """Limits of the model and of the server's settings."""

    max_model_len: int
    vocab_size: int
    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    default_max_tokens: int | None
    max_prompt_chars: int | None = None

    def check_chars(self, text: str, field: str) -> None:
        """Refuses a text that is longer than any prompt, before it is tokenised."""
        most = self.max_prompt_chars or _CHARS_PER_TOKEN * self.max_model_len
        refuse(len(text) > most, f"{field} must have at most {most} characters: it has "
               f"{len(text)}.", field, "context_length_exceeded")  # fmt: skip

    def check_tokens(self, token_ids: Sequence[int], field: str) -> None:
        """Refuses ids that the model has no embedding for. Of a large request it is called beside
        the event loop."""
        for token in (min(token_ids, default=0), max(token_ids, default=0)):
            refuse(not 0 <= token < self.vocab_size, f"{field}={token} must be at least 0 and "
                   f"below {self.vocab_size}, the model's tokens.", field)  # fmt: skip

    def job(
        self, fields: SamplingFields, prompts: list[list[int]], asked: int | None, *,
        default: int | None, field: str, prompt_field: str, least: int = 1,
        turn_ends: Sequence[int] = (), top_logprobs: int = 0, prompt_logprobs: int | None = None,
        **further: Any,
    ) -> Job:  # fmt: skip
        """Converts a request into a job for the engine.

        Args:
            asked: tokens that may follow each prompt, as the request's `field` says; None: as
                `default` does, or all that there is room for.
            prompt_field: of the prompts.
            least: that may be asked for.
            turn_ends: tokens that the chat format ends a turn with.
            top_logprobs: how many of the likeliest tokens the answer tells.
            prompt_logprobs: the same of the prompts; None: they are not scored.
        """
        refuse(asked is not None and asked < least, f"{field}={asked} must be at least {least}.",
               field)  # fmt: skip
        lengths, context, code = [], self.max_model_len, "context_length_exceeded"
        for prompt in prompts:
            room, wanted = context - len(prompt), default if asked is None else asked
            refuse(room < (1 if asked is None else min(asked, 1)), f"{prompt_field} must have "
                   f"fewer than {context} tokens, the model's context: it has {len(prompt)}.",
                   prompt_field, code)  # fmt: skip
            refuse(asked is not None and asked > room, f"{field}={asked} must be at most {room}: "
                   f"the prompt has {len(prompt)} of the {context} tokens of the model's context.",
                   field, code)  # fmt: skip
            lengths.append(room if wanted is None else min(wanted, room))
        at_least, most = fields.min_tokens or 0, min(lengths)
        refuse(at_least > most, f"min_tokens={at_least} must be at most {most}, the most.",
               "min_tokens")  # fmt: skip
        # A small request may ask for gigabytes of log-probs.
        num = sum(lengths) * (1 + top_logprobs) if top_logprobs else 0
        if prompt_logprobs is not None:
            num += sum(map(len, prompts)) * (1 + prompt_logprobs)
        num *= fields.n or 1
        given = {name: value for name in ("prompt_logprobs", "top_logprobs", "logprobs")
                 if (value := getattr(fields, name, None)) is not None}  # fmt: skip
        name = next(iter(given), "")
        refuse(num > MAX_LOGPROBS, f"{name}={given.get(name)} must ask for at most {MAX_LOGPROBS} "
               f"log-probs in an answer: of these tokens they may be {num}. Lower it or "
               "max_tokens.", name, "too_many_logprobs")  # fmt: skip
        self.check_tokens(fields.stop_token_ids or (), "stop_token_ids")
        bias = {int(token): value for token, value in (fields.logit_bias or {}).items()}
        self.check_tokens(tuple(bias), "logit_bias")
        ends = (*self.eos_token_ids, *turn_ends)
        temperature = 1.0 if fields.temperature is None else fields.temperature
        greedy = temperature < LOWEST_TEMPERATURE  # the limit of temperature 0
        stop_token_ids = (*(() if fields.ignore_eos else ends), *(fields.stop_token_ids or ()))
        try:
            params = SamplingParams(
                pad_token_id=self.pad_token_id, max_new_tokens=max(1, at_least),
                min_new_tokens=at_least, stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
                temperature=1.0 if greedy else temperature, greedy=greedy,
                top_k=max(0, fields.top_k or 0), top_logprobs=top_logprobs,
                top_p=1.0 if fields.top_p is None else fields.top_p, min_p=fields.min_p or 0.0,
                frequency_penalty=fields.frequency_penalty or 0.0,
                presence_penalty=fields.presence_penalty or 0.0,
                repetition_penalty=fields.repetition_penalty or 1.0,
                logit_bias=tuple(bias.items()),
            )  # fmt: skip
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
        return Job(
            prompts, params, lengths, n=fields.n or 1,
            seed=secrets.randbits(63) if fields.seed is None else fields.seed % 2**64,
            noise_row=fields.noise_row or 0, noise_turn=fields.noise_turn or 0,
            stops=tuple(filter(None, stops)), keeps_stop=bool(fields.include_stop_str_in_output),
            eos_token_ids=ends, prompt_logprobs=prompt_logprobs, **further,
        )  # fmt: skip


@dataclass
class Piece:
    """The part of a completion since the previous piece."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[Likeliest] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Of each token, the serial number of the weights that sampled it."""
    offsets: list[int] = field(default_factory=list)
    """Of each token, where its text begins in the completion's."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, other: Piece) -> None:
        """Puts a later piece behind this one."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.likeliest += other.likeliest
        self.versions += other.versions
        self.offsets += other.offsets
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason


class Choice:
    """Converts the tokens of one row into pieces. Streams send the pieces and other responses join
    them, so both give the same text. That of a stop token is left out; `eos_token_ids` are those of
    them that the model ends with anyway."""

    def __init__(
        self, text: TextStream, stop_token_ids: Sequence[int], eos_token_ids: Sequence[int]
    ) -> None:
        self._text = text
        self._stops, self._eos = frozenset(stop_token_ids), frozenset(eos_token_ids)
        self.is_done = False

    def tokens(self, new: Tokens) -> Piece:
        """The piece that sampled tokens add; tokens after a stop sequence add nothing."""
        piece = Piece()
        for i, (token, logprob) in enumerate(zip(new.token_ids, new.logprobs, strict=True)):
            if self.is_done:
                break
            piece.token_ids.append(token)
            piece.logprobs.append(logprob)
            piece.offsets.append(self._text.length)
            if new.likeliest:
                piece.likeliest.append(new.likeliest[i])
            piece.versions.append(new.versions[i])
            if token not in self._stops:  # else it is the last
                piece.text += self._text.push(token)
            if self._text.stopped_by is not None:
                self._finish(piece, "stop", self._text.stopped_by)
        return piece

    def end(self, ended: Ended) -> Piece:
        """The last piece; 500 where the model gave no numbers."""
        piece = Piece()
        refuse(ended.finish == "error",
               "The model's logits are not finite: its weights are broken.", status=500)
        piece.text = self._text.finish()
        if self._text.stopped_by is not None:
            self._finish(piece, "stop", self._text.stopped_by)
            return piece
        last = ended.token_ids[-1] if ended.token_ids else None
        is_named = ended.finish == "stop" and last not in self._eos
        reasons = {"aborted": "abort"}
        self._finish(piece, reasons.get(ended.finish, ended.finish), last if is_named else None)
        return piece

    def _finish(self, piece: Piece, reason: str, stop_reason: str | int | None) -> None:
        self.is_done = True
        piece.finish_reason, piece.stop_reason = reason, stop_reason
