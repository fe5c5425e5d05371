"""What single tokens of a vocabulary are, as text and as bytes."""

from __future__ import annotations

from typing import Any


class TokenTexts:
    """What single tokens of a vocabulary are, as text and as bytes.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_byte_level = "ByteLevel" in str(getattr(backend, "decoder", ""))
        self._bytes = {char: byte for byte, char in _byte_letters().items()}
        self._special = set(tokenizer.all_special_ids)

    def of(self, token_id: int) -> tuple[str, list[int]]:
        """Its text, and the bytes of it: of a part of a character the text is a mark."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

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


def _byte_letters() -> dict[int, str]:
    """The printable letter that byte-level vocabularies (GPT-2's) write for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
