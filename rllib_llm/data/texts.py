"""Token batches of texts for supervised fine-tuning and the pretraining loss.

A row is {"text"}, {"prompt", "completion"} or {"messages"}; which tokens are targets is its loss
mask: the completion's, the assistant's, or all. Every text ends with the EOS token, which is a
target: a model that never sees it never learns to stop. A conversation ends as its chat template
ends it.
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch

from rllib_llm.data.encoding import (
    Part,
    as_turns,
    encode_chat,
    encode_ended,
    parts_of_rows,
    vocabulary_hash,
)
from rllib_llm.data.rows import DataSourceError, EpochOrder
from rllib_llm.data.sources import Source, load_rows
from rllib_llm.shared import columns
from rllib_llm.shared.columns import pad_right
from rllib_llm.shared.errors import SettingError

LOSS_ON = ("completion", "all")
TokenizedText = tuple[list[int], list[bool]]  # ids and loss mask


class BatchSource(Protocol):
    """Rows of a data set, in batches by position."""

    @property
    def truncated_share(self) -> float:
        """Share of the texts read so far that were too long and were cut."""

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
            raise SettingError(
                name="loss_on",
                value=loss_on,
                rule=f"be one of {LOSS_ON}",
                reason="it says which tokens are targets",
                remedy="Use 'completion' to leave prompts out",
            )
        if tokenizer.eos_token_id is None:
            raise SettingError(
                name="tokenizer.eos_token",
                value=None,
                rule="be a token",
                reason="every text ends with it, or the model never learns to stop",
                remedy="Set tokenizer.eos_token and save the tokenizer again",
            )
        self._rows = load_rows(data)
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._num_cut = 0
        self._loss_on = loss_on
        self._keep_end = keep_end
        self._vocabulary = (
            vocabulary_hash(tokenizer) if "completion_ids" in self._rows.columns else None
        )
        # A rollout is learnt from as it was sampled: it is one row already.
        self._parts = None if self._vocabulary else parts_of_rows(self._rows, tokenizer)
        self._order = EpochOrder(len(self), seed, shuffle=shuffle)
        self._tokenized: dict[int, TokenizedText] = {}

    def __len__(self) -> int:
        return len(self._rows if self._parts is None else self._parts)

    @property
    def truncated_share(self) -> float:
        """Share of the texts read so far that are longer than `max_length`."""
        return self._num_cut / max(1, len(self._tokenized))

    def batch(self, position: int, count: int) -> dict[str, torch.Tensor]:
        """`input_ids`, `attention_mask`, `loss_mask`, each [count, L], right-padded."""
        cut_before = self._num_cut
        texts = [self._text(int(i)) for i in self._order.indices(position, count)]
        if cut_before == 0 and self._num_cut:
            warn_of_cuts(self._num_cut, count, self._max_length, "end")
        ids, mask = pad_right([ids for ids, _ in texts], self._tokenizer.pad_token_id)
        loss_mask, _ = pad_right([targets for _, targets in texts], False, torch.bool)
        loss_mask[:, 0] = False  # nothing predicts a first token
        return {columns.INPUT_IDS: ids, columns.ATTENTION_MASK: mask, columns.LOSS_MASK: loss_mask}

    def _text(self, index: int) -> TokenizedText:
        if index not in self._tokenized:
            ids, targets = self._tokenize(index)
            self._num_cut += len(ids) > self._max_length
            self._tokenized[index] = self._cut(ids), self._cut(targets)
        return self._tokenized[index]

    def _cut(self, items: list[Any]) -> list[Any]:
        if len(items) > self._max_length and self._keep_end:
            return items[: self._max_length - 1] + items[-1:]
        return items[: self._max_length]

    def _tokenize(self, index: int) -> TokenizedText:
        part = None if self._parts is None else self._parts[index]
        place = index if part is None else part.row
        row = self._rows[place]
        try:
            ids, targets = self._encode(row, part)
        except DataSourceError as error:
            raise error.at(f"row {place} of {self._rows.description}") from error
        return ids, [True] * len(ids) if self._loss_on == "all" else targets

    def _encode(self, row: dict[str, Any], part: Part | None) -> TokenizedText:
        if part is not None:
            messages = list(row["messages"])[: part.end]
            return encode_chat(self._tokenizer, messages, part.start, tools=row.get("tools"))
        if row.get("completion_ids") is not None and row.get("tokenizer") == self._vocabulary:
            # The very tokens that a policy of this vocabulary sampled; one that was cut off gets no
            # EOS it did not say.
            asked, sampled = list(row["prompt_ids"]), list(row["completion_ids"])
            return asked + sampled, [False] * len(asked) + list(row["loss_mask"])
        if row.get("completion_ids") is not None and row.get("messages") is not None:
            raise DataSourceError(OTHER_TOKENIZER)
        if row.get("messages") is not None:
            return encode_chat(self._tokenizer, list(row["messages"]), tools=row.get("tools"))
        prompt, completion = row.get("prompt"), row.get("completion")
        if prompt is not None and completion is not None:
            if isinstance(prompt, list) or isinstance(completion, list):
                return encode_chat(self._tokenizer, *as_turns(prompt, completion))
            ids, border = encode_ended(self._tokenizer, prompt, completion)
            return ids, [False] * border + [True] * (len(ids) - border)
        if row.get("text") is not None:
            ids, _ = encode_ended(self._tokenizer, "", row["text"])
            return ids, [True] * len(ids)
        raise DataSourceError(
            name=f"a row with the columns {sorted(row)}",
            rule="have 'text', or 'prompt' and 'completion', or 'messages'",
            reason="nothing else is a text",
            remedy="Rename a column, e.g. with {path: ..., columns: {text: yours}}",
        )


OTHER_TOKENIZER = (
    "a conversation of a policy must be learnt from with the tokenizer that sampled it: its tokens "
    "say what the policy said, and another tokenizer's would not. Take the model of that run."
)


def warn_of_cuts(num_cut: int, num_texts: int, max_length: int, lost: str) -> None:
    """Warns that texts were longer than `max_length` and `lost` their "beginning" or "end"."""
    warnings.warn(
        f"{num_cut} of the first {num_texts} texts are longer than max_length={max_length} tokens "
        f"and lose their {lost}; later ones lose it without a word. Raise max_length, or drop "
        "them.",
        stacklevel=3,
    )
