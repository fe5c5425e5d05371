"""Token batches of texts for supervised fine-tuning and the pretraining loss.

A row is {"text"}, {"prompt", "completion"} or {"messages"}; which tokens are targets is its loss
mask: the completion's, the assistant's, or all. Every text ends with the EOS token, which is a
target: a model that never sees it never learns to stop. A conversation ends as its chat template
ends it.
"""

from __future__ import annotations

import functools
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from rllib_llm.data.encoding import (
    Part,
    as_turns,
    encode_chat,
    encode_ended,
    parts_of_rows,
    row_settings,
    vocabulary_hash,
)
from rllib_llm.data.image_prompts import ImagePrompts, images_of_row
from rllib_llm.data.rows import EpochOrder, Rows
from rllib_llm.data.sources import Source, load_rows
from rllib_llm.modules.images import image_columns
from rllib_llm.shared import columns
from rllib_llm.shared.columns import pad_right
from rllib_llm.shared.errors import Problems, require

LOSS_ON = ("completion", "all")
TokenizedText = tuple[list[int], list[bool]]  # ids and loss mask


class EncodedText(NamedTuple):
    """A text's ids and loss mask, and what the model's processor made of its images."""

    ids: list[int]
    targets: list[bool]
    seen: Mapping[str, torch.Tensor] = {}


class BatchSource:
    """Rows of a data set, in batches by position; a subclass encodes a row, and makes the columns
    of a batch. `size`: how many there are in an epoch. `max_length`: tokens kept of each text.
    `model`: whose processor reads images, with `chat_template`."""

    _lost = "end"  # what a text loses that is too long
    _texts_of_row = 1
    is_unpaired = False  # whether a row is one completion with a label

    def __init__(
        self, rows: Rows, size: int, *, tokenizer: Any, max_length: int, seed: int = 0,
        shuffle: bool = True, model: str | None = None, chat_template: str | None = None,
    ) -> None:  # fmt: skip
        self._rows, self._tokenizer, self._max_length = rows, tokenizer, max_length
        self._model, self._chat_template = model, chat_template
        self.num_cut = self.num_read = 0  # texts
        self._order = EpochOrder(size, seed, shuffle=shuffle)

    def __len__(self) -> int:
        """Rows of one epoch."""
        return self._order.num_rows

    @property
    def truncated_share(self) -> float:
        """Share of the texts read so far that are longer than `max_length`."""
        return self.num_cut / max(1, self.num_read)

    def batch(self, position: int, count: int) -> dict[str, torch.Tensor]:
        """Columns [count, ...] of the rows from `position` on, epoch after epoch."""
        return self.columns(self.encoded(position, count))

    def encoded(self, position: int, count: int) -> list[Any]:
        """Those rows, encoded one by one."""
        cut_before = self.num_cut
        encoded = [self._of_index(int(i)) for i in self._order.indices(position, count)]
        if cut_before == 0 and self.num_cut:
            warnings.warn(
                f"{self.num_cut} of the first {self.num_read} texts are longer than max_length="
                f"{self._max_length} tokens and lose their {self._lost}, as later ones will. Raise "
                "max_length, or drop them.",
                stacklevel=3,
            )
        return encoded

    def _of_row(self, place: int, part: Part | None = None) -> Any:
        self.num_read += self._texts_of_row
        try:
            return self._encode(self._rows[place], part)
        except Problems as error:
            raise error.within(f"row {place} of {self._rows.description}") from error

    @functools.cached_property
    def _image_prompts(self) -> ImagePrompts:
        return ImagePrompts(self._model, self._tokenizer, self._chat_template)

    def _example(
        self, row: Mapping[str, Any]
    ) -> tuple[list[int], list[bool], Mapping[str, torch.Tensor]]:
        """`ImagePrompts.example` of a row with images, whose prompt is never cut."""
        ids, targets, seen = self._image_prompts.example(row)
        num_read = len(ids) if True not in targets else targets.index(True)
        require(num_read < self._max_length, "prompt", f"of {num_read} tokens",
                f"have fewer than max_length={self._max_length}", "its images count, too",
                "Raise max_length, or make the images smaller")  # fmt: skip
        return ids, targets, seen

    def _is_stored(self, row: Mapping[str, Any], of: str = "") -> bool:
        """Whether a row has the tokens that a policy of this vocabulary sampled.

        Raises:
            Problems: it is a conversation of another tokenizer.
        """
        if row.get(f"{of}completion_ids") is None:
            return False
        is_own = row.get("tokenizer") == self._vocabulary
        require(is_own or row.get(f"{of}messages") is None, "a policy's conversation", ...,
                "be learnt from with the tokenizer that sampled it", "another one's tokens are "
                "not what it sampled", "Take the model of that run")  # fmt: skip
        return is_own

    @functools.cached_property
    def _vocabulary(self) -> str:
        return vocabulary_hash(self._tokenizer)

    @abstractmethod
    def _of_index(self, index: int) -> Any:
        """The encoded row at an index of the epoch, by `_of_row`."""

    @abstractmethod
    def _encode(self, row: dict[str, Any], part: Part | None = None) -> Any: ...

    @abstractmethod
    def columns(self, encoded: list[Any]) -> dict[str, torch.Tensor]: ...


class TextSource(BatchSource):
    """Batches of texts by position, tokenised on first use and kept: `input_ids`, `attention_mask`,
    `loss_mask`, each [count, L], right-padded."""

    def __init__(
        self, data: Source, *, tokenizer: Any, loss_on: str = "completion", keep_end: bool = False,
        **settings: Any,
    ) -> None:  # fmt: skip
        """`loss_on`: "completion" (the prompt's tokens are no targets; a plain text is all target)
        or "all". `keep_end`: a text that is cut keeps its last token, EOS, for judges that read
        their score there. `settings`: see `BatchSource`; a text is cut at its end."""
        require(loss_on in LOSS_ON, "loss_on", loss_on, f"be one of {LOSS_ON}", "", "")
        require(tokenizer.eos_token_id is not None, "tokenizer.eos_token", None, "be a token",
                "the model would never learn to stop", "Set it and save the tokenizer")  # fmt: skip
        rows = load_rows(data)
        # A rollout is learnt from as it was sampled: it is one row already; so are rows of images.
        is_whole = "completion_ids" in rows.columns or bool(len(rows) and images_of_row(rows[0]))
        self._parts = None if is_whole else parts_of_rows(rows, tokenizer)
        size = len(rows if self._parts is None else self._parts)
        super().__init__(rows, size, tokenizer=tokenizer, **settings)
        self._loss_on, self._keep_end = loss_on, keep_end
        self._tokenized: dict[int, EncodedText] = {}

    def _of_index(self, index: int) -> EncodedText:
        if self._parts is None and images_of_row(self._rows[index]):
            return self._of_row(index)  # pixels are too large to be kept
        if index not in self._tokenized:
            part = None if self._parts is None else self._parts[index]
            ids, targets, _ = self._of_row(index if part is None else part.row, part)
            self.num_cut += len(ids) > self._max_length
            targets = [True] * len(ids) if self._loss_on == "all" else targets
            self._tokenized[index] = EncodedText(self._cut(ids), self._cut(targets))
        return self._tokenized[index]

    def columns(self, encoded: list[EncodedText]) -> dict[str, torch.Tensor]:
        ids, mask = pad_right([text.ids for text in encoded], self._tokenizer.pad_token_id)
        loss_mask, _ = pad_right([text.targets for text in encoded], False, torch.bool)
        loss_mask[:, 0] = False  # nothing predicts a first token
        seen = image_columns([text.seen for text in encoded])
        texts = {columns.INPUT_IDS: ids, columns.ATTENTION_MASK: mask, columns.LOSS_MASK: loss_mask}
        return {**texts, **seen}

    def _cut(self, items: list[Any]) -> list[Any]:
        if len(items) > self._max_length and self._keep_end:
            return items[: self._max_length - 1] + items[-1:]
        return items[: self._max_length]

    def _encode(self, row: dict[str, Any], part: Part | None = None) -> EncodedText:
        if not images_of_row(row):
            return EncodedText(*self._encode_text(row, part))
        ids, targets, seen = self._example(row)
        self.num_cut += len(ids) > self._max_length
        if self._loss_on == "all":
            targets = [token != self._image_prompts.image_token_id for token in ids]
        return EncodedText(self._cut(ids), self._cut(targets), seen)

    def _encode_text(self, row: dict[str, Any], part: Part | None) -> TokenizedText:
        if part is not None and row["messages"] is not None:
            messages = list(row["messages"])[: part.end]
            return encode_chat(self._tokenizer, messages, part.start, **row_settings(row))
        if self._is_stored(row):
            # The very tokens that a policy of this vocabulary sampled; one that was cut off gets no
            # EOS it did not say.
            asked, sampled = list(row["prompt_ids"]), list(row["completion_ids"])
            return asked + sampled, [False] * len(asked) + list(row["loss_mask"])
        if row.get("messages") is not None:
            return encode_chat(self._tokenizer, row["messages"], **row_settings(row))
        prompt, completion = row.get("prompt"), row.get("completion")
        if prompt is not None and completion is not None:
            if isinstance(prompt, list) or isinstance(completion, list):
                turns = as_turns(prompt, completion)
                return encode_chat(self._tokenizer, *turns, **row_settings(row))
            ids, border = encode_ended(self._tokenizer, prompt, completion)
            return ids, [False] * border + [True] * (len(ids) - border)
        if row.get("text") is not None:
            ids = encode_ended(self._tokenizer, "", row["text"])[0]
            return ids, [True] * len(ids)
        raise Problems(f"a row with the columns {sorted(row)}", "have 'text', or 'prompt' and "
                       "'completion', or 'messages'", "", "Rename a column, e.g. with {path: ..., "
                       "columns: {text: yours}}")  # fmt: skip
