"""One completion of a request as it comes: its text, its tokens and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rllib_llm.engines.completions import Likeliest, Tokens
from rllib_llm.engines.protocol import Ended
from rllib_llm.serving.errors import ApiError
from rllib_llm.serving.texts import TextStream


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
