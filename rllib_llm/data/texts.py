"""Token batches of texts for supervised fine-tuning, pretraining loss and preference pairs.

A row is {"text"}, {"prompt", "completion"} or {"messages"}; which tokens are targets is its loss
mask: the completion's, the assistant's, or all. Every text ends with the EOS token, which is a
target: a model that never sees it never learns to stop.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch

from rllib_llm import columns
from rllib_llm.data.order import EpochOrder
from rllib_llm.data.rows import DataSourceError
from rllib_llm.data.sources import Source, load_rows

LOSS_ON = ("completion", "all")
TokenizedText = tuple[list[int], list[bool]]  # ids and loss mask


class BatchSource(Protocol):
    """Rows of a data set, in batches by position."""

    def __len__(self) -> int:
        """Rows of one epoch."""

    def batch(self, position: int, count: int) -> dict[str, torch.Tensor]:
        """Columns [count, ...] of the rows from `position` on, epoch after epoch."""


class TextSource:
    """Batches of texts by position; tokenised on first use and kept."""

    def __init__(
        self,
        data: Source,
        *,
        tokenizer: Any,
        max_length: int,
        seed: int = 0,
        loss_on: str = "completion",
        shuffle: bool = True,
        keep_end: bool = False,
    ):
        """`max_length`: tokens kept of each text, from its beginning. `loss_on`: "completion"
        (the prompt's tokens are no targets; a plain text is all target) or "all". `keep_end`:
        a text that is cut keeps its last token, EOS, for judges that read their score there."""
        if loss_on not in LOSS_ON:
            raise ValueError(
                f"loss_on={loss_on!r} must be one of {LOSS_ON}: it says which tokens are targets. "
                "Use 'completion' to leave prompts out."
            )
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "tokenizer.eos_token=None must be a token: every text ends with it, or the model "
                "never learns to stop. Set tokenizer.eos_token and save the tokenizer again."
            )
        self._rows = load_rows(data)
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._num_cut = 0
        self._loss_on = loss_on
        self._keep_end = keep_end
        self._order = EpochOrder(len(self._rows), seed, shuffle=shuffle)
        self._tokenized: dict[int, TokenizedText] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, position: int, count: int) -> dict[str, torch.Tensor]:
        """`input_ids`, `attention_mask`, `loss_mask`, each [count, L], right-padded."""
        cut_before = self._num_cut
        texts = [self._text(int(i)) for i in self._order.indices(position, count)]
        if cut_before == 0 and self._num_cut:
            warn_of_cuts(self._num_cut, count, self._max_length, "end")
        ids, mask = pad_right([ids for ids, _ in texts], self._tokenizer.pad_token_id)
        loss_mask = torch.zeros_like(mask)
        for row, (_, targets) in enumerate(texts):
            loss_mask[row, : len(targets)] = torch.tensor(targets)
        loss_mask[:, 0] = False  # nothing predicts a first token
        return {
            columns.INPUT_IDS: ids,
            columns.ATTENTION_MASK: mask,
            columns.LOSS_MASK: loss_mask,
        }

    def _text(self, index: int) -> TokenizedText:
        if index not in self._tokenized:
            ids, targets = self._tokenize(self._rows[index], index)
            self._num_cut += len(ids) > self._max_length
            self._tokenized[index] = self._cut(ids), self._cut(targets)
        return self._tokenized[index]

    def _cut(self, items: list[Any]) -> list[Any]:
        if len(items) <= self._max_length:
            return items
        return items[: self._max_length - 1] + items[-1:] if self._keep_end else items[
            : self._max_length
        ]

    def _tokenize(self, row: dict[str, Any], index: int) -> TokenizedText:
        if row.get("messages") is not None:
            return self._tokenize_chat(row["messages"])
        if row.get("prompt") is not None and row.get("completion") is not None:
            if isinstance(row["prompt"], list):  # both are chat messages
                return self._tokenize_chat([*row["prompt"], *row["completion"]])
            prompt = encode_start(self._tokenizer, row["prompt"])
            completion = encode_end(self._tokenizer, row["completion"])
            return prompt + completion, [self._loss_on == "all"] * len(prompt) + [True] * len(
                completion
            )
        if row.get("text") is not None:
            start = encode_start(self._tokenizer, row["text"])
            end = [self._tokenizer.eos_token_id]
            return start + end, [True] * (len(start) + 1)
        raise DataSourceError(
            f"row {index} of {self._rows.description} has columns {sorted(row)} and must have "
            "'text', or 'prompt' and 'completion', or 'messages': nothing else is a text. "
            "Rename a column, e.g. with {path: ..., columns: {text: yours}}."
        )

    def _tokenize_chat(self, messages: list[dict[str, str]]) -> TokenizedText:
        encoded = self._tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=self._loss_on == "completion"
        )
        ids = list(encoded["input_ids"])
        targets = encoded.get("assistant_masks")
        if targets is not None and not any(targets):
            # Templates without {% generation %} marks cannot tell: all but the last turn is prompt.
            prompt = self._tokenizer.apply_chat_template(
                messages[:-1], add_generation_prompt=True, return_dict=True
            )["input_ids"]
            targets = [False] * len(prompt) + [True] * (len(ids) - len(prompt))
        return ids, [bool(target) for target in targets] if targets is not None else [
            True
        ] * len(ids)


class PairSource:
    """Batches of preference pairs by position: rows {"chosen", "rejected"} and maybe "prompt"."""

    def __init__(
        self, data: Source, *, tokenizer: Any, max_length: int, seed: int = 0, shuffle: bool = True
    ):
        self._rows = load_rows(data)
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._num_cut = 0
        self._order = EpochOrder(len(self._rows), seed, shuffle=shuffle)

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, position: int, count: int) -> dict[str, torch.Tensor]:
        """`chosen_ids`, `chosen_mask`, `rejected_ids`, `rejected_mask`, each [count, L]."""
        rows = [self._rows[int(i)] for i in self._order.indices(position, count)]
        cut_before = self._num_cut
        chosen, chosen_mask = self._encode(rows, "chosen")
        rejected, rejected_mask = self._encode(rows, "rejected")
        if cut_before == 0 and self._num_cut:
            warn_of_cuts(self._num_cut, 2 * count, self._max_length, "beginning")
        return {
            columns.CHOSEN_IDS: chosen,
            columns.CHOSEN_MASK: chosen_mask,
            columns.REJECTED_IDS: rejected,
            columns.REJECTED_MASK: rejected_mask,
        }

    def _encode(self, rows: list[dict[str, Any]], name: str) -> tuple[torch.Tensor, torch.Tensor]:
        texts = []
        for row in rows:
            if row.get(name) is None:
                raise DataSourceError(
                    f"{self._rows.description} has columns {sorted(row)} and must have 'chosen' "
                    "and 'rejected' (and 'prompt', where they lack it): a pair is two texts. "
                    "Rename a column, or make pairs with rllib_llm.data.pairs."
                )
            ids = self._tokenize(row.get("prompt"), row[name])
            self._num_cut += len(ids) > self._max_length
            starts = (self._tokenizer.bos_token_id, self._tokenizer.cls_token_id)
            texts.append(keep_end(ids, self._max_length, starts))
        return pad_right(texts, self._tokenizer.pad_token_id)

    def _tokenize(self, prompt: Any, answer: Any) -> list[int]:
        if isinstance(answer, list):  # a conversation
            turns = (prompt if isinstance(prompt, list) else []) + answer
            return list(
                self._tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
            )
        if self._tokenizer.eos_token_id is None:  # an encoder's: it puts its own end
            return list(self._tokenizer((prompt or "") + answer)["input_ids"])
        if prompt is None:
            return encode_start(self._tokenizer, answer) + [self._tokenizer.eos_token_id]
        return encode_start(self._tokenizer, prompt) + encode_end(self._tokenizer, answer)


def encode_start(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that begins a sequence: a BOS where the tokenizer adds one, never an EOS."""
    ids = list(tokenizer(text)["input_ids"])
    if ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        return ids[:-1]
    return ids


def encode_end(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that continues and ends a sequence: EOS at the end, no BOS."""
    return tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]


def keep_end(ids: list[int], max_length: int, starts: Collection[int | None]) -> list[int]:
    """The last `max_length` ids; a first one that is among `starts` (BOS, CLS) is kept, since
    models read all else after it."""
    if len(ids) <= max_length:
        return ids
    if ids[0] in starts and max_length > 1:
        return [ids[0], *ids[len(ids) - max_length + 1 :]]
    return ids[len(ids) - max_length :]


def warn_of_cuts(num_cut: int, num_texts: int, max_length: int, lost: str) -> None:
    """Warns that texts were longer than `max_length` and `lost` their "beginning" or "end"."""
    warnings.warn(
        f"{num_cut} of the first {num_texts} texts are longer than max_length={max_length} tokens "
        f"and lose their {lost}; later ones lose it without a word. Raise max_length, or drop "
        "them.",
        stacklevel=3,
    )


def pad_right(rows: Sequence[list[int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [rows, L] int64 and mask [rows, L] bool of rows of unequal length."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad_token_id, dtype=torch.int64)
    mask = torch.zeros((len(rows), longest), dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    return ids, mask
