"""Token ids of texts, which of them lie in a part of the text, and what single tokens are.

A prompt and its completion are tokenised as one text. Tokenised by itself a completion would begin
with the space that SentencePiece puts in front of every text: "2+2=" and "4" would make "2+2= 4".
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

from rllib_llm.data.rows import DataSourceError

Span = tuple[int, int]  # of characters, the end excluded


def check_text(text: Any) -> None:
    """Raises DataSourceError where it is no text that UTF-8 can write."""
    reason = ""
    if not isinstance(text, str):
        reason = f"it is {type(text).__name__}"
    else:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            reason = f"{text[error.start]!r} in it is half of a character"
    if reason:
        raise DataSourceError(
            name=f"what is to be read, {str(text)[:60]!r},",
            rule="be text that UTF-8 can write",
            reason=reason,
            remedy="Correct the row, or drop it",
        )


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that begins a sequence: a BOS where the tokenizer adds one, never an EOS."""
    check_text(text)
    return _without_added_eos(tokenizer, text, list(tokenizer(text)["input_ids"]))


def encode_ended(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], int]:
    """Ids of `prompt + completion` with one EOS at the end, and how many belong to the prompt.

    A token that holds characters of both is the completion's: the model has to write it.
    """
    check_text(prompt)
    check_text(completion)
    text = prompt + completion
    ids, targets = encode_spans(
        tokenizer, text, [(len(prompt), len(text))], add_special_tokens=True
    )
    border = targets.index(True) if any(targets) else len(ids)
    if not ids or ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    return ids, min(border, len(ids) - 1)


def encode_spans(
    tokenizer: Any, text: str, spans: Sequence[Span], *, add_special_tokens: bool
) -> tuple[list[int], list[bool]]:
    """Ids of `text`, without an EOS that the tokenizer adds, and whether each one ends in a span.

    Tokenizers without offsets (those not made with the `tokenizers` library) tell where a span
    begins by the tokens that the text has in common with its beginning alone.
    """
    check_text(text)
    if tokenizer.is_fast:
        encoded = tokenizer(
            text, add_special_tokens=add_special_tokens, return_offsets_mapping=True
        )
        ends = [end for _, end in encoded["offset_mapping"]]
        ids = _without_added_eos(tokenizer, text, list(encoded["input_ids"]))
        inside = [any(start < end <= stop for start, stop in spans) for end in ends[: len(ids)]]
        return ids, inside

    def encode(part: str) -> list[int]:
        ids = list(tokenizer(part, add_special_tokens=add_special_tokens)["input_ids"])
        return _without_added_eos(tokenizer, part, ids)

    ids = encode(text)
    inside = [False] * len(ids)
    for start, stop in spans:
        first, last = (common_prefix_len(encode(text[:edge]), ids) for edge in (start, stop))
        inside[first:last] = [True] * (last - first)
    return ids, inside


def common_prefix_len(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def keep_end(ids: list[int], max_length: int, starts: Collection[int | None]) -> list[int]:
    """The last `max_length` ids; a first one that is among `starts` (BOS, CLS) is kept, since
    models read all else after it."""
    if len(ids) <= max_length:
        return ids
    if ids[0] in starts and max_length > 1:
        return [ids[0], *ids[len(ids) - max_length + 1 :]]
    return ids[len(ids) - max_length :]


def _without_added_eos(tokenizer: Any, text: str, ids: list[int]) -> list[int]:
    eos = tokenizer.eos_token_id
    if eos is not None and ids and ids[-1] == eos and not text.endswith(tokenizer.eos_token):
        return ids[:-1]
    return ids


def vocabulary_hash(tokenizer: Any) -> str:
    """A hash of the tokenizer's vocabulary: where it is the same, ids mean the same tokens."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    text = "\n".join(f"{number} {token}" for token, number in pairs)
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


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
