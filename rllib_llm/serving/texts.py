"""Tokens to text while they come: whole characters, and nothing that a stop text may take back; and
one completion as it comes, its text, its tokens and why it ended (`Choice`, `Piece`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rllib_llm.engines.completions import Likeliest, Tokens
from rllib_llm.engines.protocol import Ended
from rllib_llm.serving.errors import ApiError


@dataclass
class Piece:
    """What has come of a completion since the piece before."""

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
    """Turns the tokens of one row into pieces. Whoever streams sends them as they are; whoever does
    not adds them up, so that both say the same.

    Args:
        text: of the completion.
        stop_token_ids: of the row; the text of one that ends it is left out.
        eos_token_ids: those of them that the model ends with anyway.
    """

    def __init__(
        self, text: TextStream, stop_token_ids: Sequence[int], eos_token_ids: Sequence[int]
    ) -> None:
        self._text = text
        self._stops, self._eos = frozenset(stop_token_ids), frozenset(eos_token_ids)
        self.is_done = False
        self.num_tokens = 0
        self.spans: list[list[int]] = []
        """[serial number of weights, first token, behind the last that they sampled]."""

    @property
    def versions(self) -> list[int]:
        """Serial numbers of the weights that sampled it, in their order."""
        return [serial for serial, _, _ in self.spans]

    def tokens(self, new: Tokens) -> Piece:
        """What tokens that were sampled add; behind a stop text they add nothing."""
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
            if not self.spans or self.spans[-1][0] != new.versions[i]:
                self.spans.append([new.versions[i], self.num_tokens, self.num_tokens])
            self.num_tokens += 1
            self.spans[-1][2] = self.num_tokens
            if token not in self._stops:  # else it is the last
                piece.text += self._text.push(token)
            if self._text.stopped_by is not None:
                self._finish(piece, "stop", self._text.stopped_by)
        return piece

    def end(self, ended: Ended) -> Piece:
        """The last piece.

        Raises:
            ApiError: 500, the model gave no numbers.
        """
        piece = Piece()
        if self.is_done:
            return piece
        if ended.finish == "error":
            raise ApiError(500, "The model's logits are not finite: its weights are broken.")
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


HALF_CHARACTER = "\ufffd"
# So many tokens without a whole character at their end are none: they are shown as they are.
_MAX_HELD_TOKENS = 24


class TextStream:
    """The text of one completion, token by token.

    Text is final once it is given out: half a character is held back until it is whole, and the
    beginning of a stop text until it is one or none.

    Args:
        tokenizer: of the model.
        before: tokens that the completion follows in the same text, for the space in front of it.
        stops: texts that end it.
        keeps_stop: whether the stop text belongs to it.
    """

    def __init__(
        self,
        tokenizer: Any,
        before: Sequence[int] = (),
        stops: Sequence[str] = (),
        keeps_stop: bool = False,
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._decode = tokenizer.decode if backend is None else backend.decode
        self._ids = list(before)
        self._num_shown = len(self._ids)  # of `ids`, whose text is out
        self._shown = self._decode(self._ids, skip_special_tokens=True) if self._ids else ""
        self._stops, self._keeps_stop = [stop for stop in stops if stop], keeps_stop
        self._held = ""  # whole characters that may begin a stop text
        self.length = 0  # characters so far, those that are held back among them
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """The text that is final now and was not before; with `stopped_by` set it is the last."""
        self._ids.append(token_id)
        text = self._decode(self._ids, skip_special_tokens=True)
        num_held = len(self._ids) - self._num_shown
        if text.endswith(HALF_CHARACTER) and num_held < _MAX_HELD_TOKENS:
            return ""
        return self._until_stop(self._advance(text))

    def _advance(self, text: str) -> str:
        """What `text`, of all ids, has behind the text that is out; later ids begin here."""
        new = text[len(self._shown) :]
        self._ids = self._ids[self._num_shown :]
        self._num_shown = len(self._ids)
        self._shown = self._decode(self._ids, skip_special_tokens=True)
        self.length += len(new)
        return new

    def _until_stop(self, new: str) -> str:
        if not self._stops:
            return new
        text = self._held + new
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda each: (each[0], -len(each[1])))
            self._held = ""
            end = at + len(self.stopped_by) if self._keeps_stop else at
            self.length -= len(text) - end
            return text[:end]
        keep = self._may_begin_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _may_begin_stop(self, text: str) -> int:
        """Characters at the end that are the beginning of a stop text."""
        for count in range(min(len(text), max(map(len, self._stops)) - 1), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0

    def finish(self) -> str:
        """What was held back, at the end."""
        if self.stopped_by is not None:
            return ""
        rest = ""
        if len(self._ids) > self._num_shown:
            rest = self._advance(self._decode(self._ids, skip_special_tokens=True))
        text = self._until_stop(rest)
        if self.stopped_by is not None:
            return text
        held, self._held = self._held, ""
        return text + held
