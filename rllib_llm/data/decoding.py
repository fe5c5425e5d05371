"""Texts of tokens: of single ones, and of a completion while it is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TokenTexts:
    """Single tokens of a vocabulary as text and as bytes.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_byte_level = "ByteLevel" in str(getattr(backend, "decoder", ""))
        self._bytes = {char: byte for byte, char in bytes_to_unicode().items()}
        self._special = set(tokenizer.all_special_ids)

    def of(self, token_id: int) -> tuple[str, list[int]]:
        """Its text, and the bytes of it: of a part of a character the text is a mark."""
        if token_id not in self._known:
            self._known[token_id] = self._look_up(token_id)
        return self._known[token_id]

    def _look_up(self, token_id: int) -> tuple[str, list[int]]:
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:  # a row of the embedding without a token
            return "", []
        if token_id not in self._special:
            if self._is_byte_level and all(char in self._bytes for char in piece):
                raw = bytes(self._bytes[char] for char in piece)
                return raw.decode("utf-8", "replace"), list(raw)
            if len(piece) == 6 and piece.startswith("<0x"):
                raw = bytes([int(piece[3:5], 16)])
                return raw.decode("utf-8", "replace"), list(raw)
            piece = piece.replace("\u2581", " ")
        return piece, list(piece.encode())


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
        min_tokens: stop texts within so many tokens are passed over.
    """

    def __init__(
        self, tokenizer: Any, before: Sequence[int] = (), stops: Sequence[str] = (),
        keeps_stop: bool = False, min_tokens: int = 0,
    ) -> None:  # fmt: skip
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._decode = tokenizer.decode if backend is None else backend.decode
        self._ids = list(before)
        self._num_shown = len(self._ids)  # of `ids`, whose text is out
        self._shown = self._decode(self._ids, skip_special_tokens=True) if self._ids else ""
        self._stops, self._keeps_stop = [stop for stop in stops if stop], keeps_stop
        self._num_free = min_tokens  # tokens whose text cannot end it
        self._held = ""  # whole characters that may begin a stop text
        self.length = 0  # characters so far, those that are held back among them
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """The text that is final now and was not before; with `stopped_by` set it is the last."""
        self._ids.append(token_id)
        self._num_free -= 1
        text = self._decode(self._ids, skip_special_tokens=True)
        num_held = len(self._ids) - self._num_shown
        if text.endswith(HALF_CHARACTER) and num_held < _MAX_HELD_TOKENS:
            return ""
        return self._until_stop(self._advance(text))

    def _advance(self, text: str) -> str:
        """The part of `text`, decoded from all ids, that was not sent yet; later ids start here.
        Special tokens, which have no text, do not come between two words and their space."""
        new = text[len(self._shown) :]
        if new or len(self._ids) > _MAX_HELD_TOKENS:
            self._ids = self._ids[self._num_shown :]
        self._num_shown = len(self._ids)
        self._shown = self._decode(self._ids, skip_special_tokens=True)
        self.length += len(new)
        return new

    def _until_stop(self, new: str) -> str:
        if not self._stops or self._num_free >= 0:
            return new
        text = self._held + new
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda each: (each[0], -len(each[1])))
            self._held = ""
            end = at + len(self.stopped_by) if self._keeps_stop else at
            self.length -= len(text) - end
            return text[:end]
        # Hold back the longest end that is the beginning of a stop text.
        longest = min(len(text), max(map(len, self._stops)) - 1)
        begins = (n for n in range(longest, 0, -1) if any(
            stop.startswith(text[-n:]) for stop in self._stops))  # fmt: skip
        split = len(text) - next(begins, 0)
        self._held = text[split:]
        return text[:split]

    def finish(self) -> str:
        """Text held back until the end."""
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
