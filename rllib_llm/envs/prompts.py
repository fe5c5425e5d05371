"""Prompts: which one stands at a position, and how it becomes token ids."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rllib_llm.data.encoding import (
    check_text,
    encode_text,
    is_message,
    keep_end,
    num_before_answer,
    render_chat,
    row_settings,
)
from rllib_llm.data.image_prompts import COLUMNS, ImagePrompts, images_of_row
from rllib_llm.data.rows import EpochOrder, Rows, check_seed, permuted, require_columns
from rllib_llm.data.sources import SHAREGPT, Source, load_rows
from rllib_llm.envs.settings import check_values
from rllib_llm.modules.images import image_columns
from rllib_llm.shared.columns import teacher_prompt_columns
from rllib_llm.shared.errors import Problems, require

MESSAGES = "messages"  # the column of whole conversations

_SPLIT_STREAM = 2**63  # key of the split's permutation, apart from every epoch's
LARGEST_PROMPT = 2**20  # tokens of a teacher's
_NUM_REMEMBERED = 2**16  # encoded prompts: some 50 MB of short ones


@dataclass(frozen=True)
class PromptRow:
    """One prompt: its row in the data set, its text or chat messages, its other columns.

    `columns` hold a chat, whatever its column was called, as "messages".
    """

    index: int
    prompt: Any  # str, or list of {"role", "content"}
    columns: Mapping[str, Any]

    def task(self) -> dict[str, Any]:
        """Prompt and columns by name, as conversations have them."""
        return {"prompt": self.prompt, **self.columns}

    @property
    def images(self) -> list[Any]:
        """The images that it shows, as they are written; [] of a row of text."""
        if isinstance(self.prompt, str) and not any(name in self.columns for name in COLUMNS):
            return []
        return images_of_row(
            {**{name: self.columns.get(name) for name in COLUMNS}, "prompt": self.prompt}
        )


class PromptSource:
    """Prompts of a data set in a fixed, endless order, addressed by position.

    The order is `EpochOrder`'s over the rows of this split: a pure function of seed and position,
    so nothing is skipped or repeated across a restart, nor by the number of samplers.

    Args:
        data: any source of `load_rows`; it is not read for split "eval" with `eval_data`.
        seed: of the order; with `shuffle=False` the order is the data set's.
        prompt_column: column of text, or of chat messages ([{"role", "content"}, ...]); None
            takes "prompt", else "messages", else the only column. Of "messages" the assistant's
            last words are left out: they are what the policy is to say.
        split: "train" or "eval". The eval rows are `eval_data` where given, else `eval_fraction`
            of `data`, chosen by `split_seed` alone, so they are the same for every `seed`.

    Raises:
        Problems: no rows in the split, a prompt of another type, a setting out of range.
        Problems: the source cannot be read or lacks the column.
    """

    def __init__(
        self, data: Source | None, *, seed: int = 0, shuffle: bool = True,
        prompt_column: str | None = None, split: str = "train", eval_fraction: float = 0.0,
        split_seed: int = 0, eval_data: Source | None = None,
    ) -> None:  # fmt: skip
        check_values(split=split, eval_fraction=eval_fraction)
        require(
            split != "eval" or eval_fraction > 0.0 or eval_data is not None, "split", split,
            "have prompts of its own", "eval_fraction is 0 and there are no eval_prompts",
            "Write prompts: {eval_fraction: 0.1}, which holds out a tenth, or {eval_data: ...}",
        )  # fmt: skip
        require(
            eval_fraction == 0.0 or eval_data is None, "eval_fraction", eval_fraction,
            "be 0 where eval_prompts are given", "", "Remove one of the two",
        )  # fmt: skip
        from_eval_data = split == "eval" and eval_data is not None
        chosen, name = (eval_data, "eval_prompts") if from_eval_data else (data, "prompts")
        self._rows = load_rows(chosen, name=name)
        self.seed, self.shuffle, self.split = seed, bool(shuffle), split
        self.prompt_column = _choose_column(self._rows, prompt_column)
        fraction = 0.0 if from_eval_data else eval_fraction
        self._held_out = _held_out(len(self._rows), fraction, split_seed)
        num_held_out = len(self._held_out)
        self._others_before = self._held_out - np.arange(num_held_out)
        self._is_held_out = split == "eval" and fraction > 0.0
        self._num = num_held_out if self._is_held_out else len(self._rows) - num_held_out
        self._order = EpochOrder(self._num, self.seed, shuffle=self.shuffle)

    def __len__(self) -> int:
        """Number of prompts in one epoch."""
        return self._num

    @property
    def description(self) -> str:
        """Where the prompts come from, for messages."""
        return self._rows.description

    def indices(self, position: int, num_prompts: int) -> np.ndarray:
        """Data-set rows [num_prompts] int64 at positions `position, position + 1, ...`."""
        assert position >= 0 and num_prompts >= 1, (position, num_prompts)
        return self._members(self._order.indices(position, num_prompts))

    def _members(self, places: np.ndarray) -> np.ndarray:
        """Data-set rows [n] int64 at `places` [n] among the rows of this split."""
        if self._is_held_out:
            return self._held_out[places]
        # As many rows are held out before the place-th other one as have fewer others before them.
        return places + np.searchsorted(self._others_before, places, side="right")

    def rows(self, position: int, num_prompts: int) -> list[PromptRow]:
        """The prompts at positions `position, position + 1, ...`, across epochs."""
        return [self.row(int(index)) for index in self.indices(position, num_prompts)]

    def all_rows(self) -> Iterator[PromptRow]:
        """Every prompt of one epoch, in the order of the data set."""
        for place in range(self._num):
            yield self.row(int(self._members(np.array([place]))[0]))

    def row(self, index: int) -> PromptRow:
        """The prompt in row `index` of the data set."""
        columns = dict(self._rows[index])
        prompt = columns[self.prompt_column]
        del columns[self.prompt_column]
        # Judges with chat templates of their own are given the chat as `messages`; a column of that
        # name beside a prompt often holds answers as well.
        columns.pop("messages", None)
        if not isinstance(prompt, str):
            if self.prompt_column == MESSAGES and isinstance(prompt, list):
                prompt = prompt[: num_before_answer(prompt)] or prompt
            # A turn of tool calls may have no content, or one that Arrow's nulls went with.
            if not isinstance(prompt, list) or not prompt or not all(
                is_message(m) and m.keys() & {"content", "tool_calls"} for m in prompt
            ):  # fmt: skip
                wrong = Problems(self.prompt_column, "be text or messages", value=prompt)
                raise wrong.within(f"row {index} of {self.description}")
            columns["messages"] = prompt
        return PromptRow(index, prompt, columns)


class PromptEncoder:
    """Turns prompt rows into token ids; the latest rows are remembered (`_NUM_REMEMBERED`).

    Text is encoded as the tokenizer does by itself (a BOS where it adds one, but never an EOS at
    the end); chat messages go through its chat template with the generation prompt added. A prompt
    longer than `max_prompt_len` is an error, or keeps its BOS and its end; the first batch with
    such prompts warns, and `truncated` holds their rows. Images are read by the processor of
    `model`, and count: a prompt that shows some is never cut.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_prompt_len: int,
        overflow: str = "truncate_left", model: str | None = None,
    ) -> None:  # fmt: skip
        check_values(prompt_overflow=overflow)
        self._model = model
        self.tokenizer, self.max_prompt_len, self.overflow = tokenizer, max_prompt_len, overflow
        self._cache: dict[int, tuple[list[int], str]] = {}
        self._lock = threading.Lock()
        self.truncated: set[int] = set()  # rows read so far that lost their beginning

    def encode(self, rows: Sequence[PromptRow]) -> tuple[list[list[int]], list[str]]:
        """Token ids and text of each prompt; the text is that of the ids, also if truncated."""
        truncated_before = len(self.truncated)
        encoded = []
        for row in rows:
            found = self._cache.get(row.index) or self._encode_row(row)
            with self._lock:  # samplers' threads share the cache
                self._cache[row.index] = found
                if len(self._cache) > _NUM_REMEMBERED:
                    del self._cache[next(iter(self._cache))]  # the oldest, maybe of these rows
            encoded.append(found)
        if truncated_before == 0 and self.truncated:
            warnings.warn(
                f"{len(self.truncated)} of the first {len(rows)} prompts are longer than "
                f"max_prompt_len={self.max_prompt_len} and lost their beginning. Raise it, or set "
                "prompt_overflow='error' to refuse them.", stacklevel=2,
            )  # fmt: skip
        return [ids for ids, _ in encoded], [text for _, text in encoded]

    @functools.cached_property
    def _image_prompts(self) -> ImagePrompts:
        return ImagePrompts(self._model, self.tokenizer, self.tokenizer.chat_template)

    def images(
        self, rows: Sequence[PromptRow], with_files: bool = False
    ) -> dict[str, torch.Tensor]:
        """The columns of what prompts show, see `modules/images.py`; {} if all are text.
        `with_files`: also for engines with a processor of their own."""
        return image_columns([self._seen(row, with_files) if row.images else {} for row in rows])

    def _seen(self, row: PromptRow, with_files: bool) -> dict[str, torch.Tensor]:
        _, seen, text = self._image_prompts.prompt(row.prompt, row.images, row.index)
        files = self._image_prompts.files(row.prompt, text, row.images) if with_files else {}
        return {**seen, **files}

    def longest(self, source: PromptSource) -> int:
        """Tokens of the longest prompt of `source`, before any is cut."""
        return max(len(self._tokenize(row)[0]) for row in source.all_rows())

    def check(self, rows: Iterable[PromptRow]) -> None:
        """Raises Problems for a prompt that is too long, where such are refused, and
        Problems for one that the tokenizer cannot write (chats without a template)."""
        for row in rows:
            (self._encode_row if self.overflow == "error" else self._tokenize)(row)

    def _encode_row(self, row: PromptRow) -> tuple[list[int], str]:
        tokenizer = self.tokenizer
        ids, text = self._tokenize(row)
        if len(ids) <= self.max_prompt_len:
            return ids, text
        if self.overflow == "error" or row.images:
            raise Problems(
                "prompt", f"have at most max_prompt_len={self.max_prompt_len} tokens",
                f"it has {len(ids)} ({text[:60]!r}...)",
                "Raise max_prompt_len, shorten it, or set prompt_overflow='truncate_left'",
            ).within(f"row {row.index}")  # fmt: skip
        self.truncated.add(row.index)
        ids = keep_end(ids, self.max_prompt_len, (tokenizer.bos_token_id,))
        is_text = isinstance(row.prompt, str)  # the special tokens of a chat are part of its text
        return ids, str(tokenizer.decode(ids, skip_special_tokens=is_text))

    def _tokenize(self, row: PromptRow) -> tuple[list[int], str]:
        """Token ids and text of the whole prompt."""
        tokenizer = self.tokenizer
        try:
            if row.images:
                ids, _, text = self._image_prompts.prompt(row.prompt, row.images, row.index)
            elif isinstance(row.prompt, str):
                text = row.prompt
                ids = encode_text(tokenizer, text)
            else:
                settings = row_settings(row.columns)
                text = render_chat(tokenizer, row.prompt, generation_prompt=True, **settings)
                check_text(text)
                ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        except Problems as error:
            raise error.within(f"row {row.index}") from error.__cause__
        if not ids and tokenizer.bos_token_id is not None:
            ids = [tokenizer.bos_token_id]
        if not ids:
            empty = Problems("prompt", "have a token", "the tokenizer has no BOS", "", row.prompt)
            raise empty.within(f"row {row.index}")
        return ids, text


def _held_out(size: int, eval_fraction: float, split_seed: int) -> np.ndarray:
    """Rows of the data set that are held out, int64, in its order."""
    check_seed(split_seed, "split_seed")
    if eval_fraction == 0.0:
        return np.empty(0, dtype=np.int64)
    num_eval = max(1, round(size * eval_fraction))
    require(
        num_eval < size, "eval_fraction", eval_fraction, "leave prompts to train on",
        f"of {size} rows {num_eval} would be held out", "Lower it or add prompts",
    )  # fmt: skip
    return np.sort(permuted(np.arange(num_eval), size, split_seed, _SPLIT_STREAM))


def _choose_column(rows: Rows, prompt_column: str | None) -> str:
    if prompt_column is not None:
        if prompt_column == SHAREGPT and SHAREGPT not in rows.columns and MESSAGES in rows.columns:
            prompt_column = MESSAGES  # as `load_rows` names it
        require_columns(rows, [prompt_column], "env_config.prompt_column")
        return prompt_column
    for column in ("prompt", MESSAGES):
        if column in rows.columns:
            return column
    if len(rows.columns) == 1:
        return rows.columns[0]
    remedy = f"such as `prompts: {{column: {next(iter(rows.columns), 'text')}}}`"
    raise Problems(
        "prompts.column", "be set", f"{rows.description} has no column 'prompt' but {rows.columns}",
        f"Name the one that holds the prompts, {remedy} (prompt_column in Python)",
    )  # fmt: skip


def teacher_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[PromptRow], column: str
) -> dict[str, Tensor]:
    """The columns `teacher_prompt_ids` and `teacher_prompt_mask` [B, Q]: what a teacher reads, text
    or messages, in a column of the data; it is not truncated.

    Raises:
        Problems: a row has none.
    """
    encoder = PromptEncoder(tokenizer, LARGEST_PROMPT, "error")
    found: dict[int, list[int]] = {}
    for row in rows:
        if row.index not in found:
            text = row.columns.get(column)
            require(bool(text), f"row {row.index}: {column}", text, "be the teacher's prompt",
                    "teacher_prompt names this column", "Fill it in, or leave it out")  # fmt: skip
            ((ids,), _) = encoder.encode([replace(row, prompt=text)])
            found[row.index] = ids
    prompts = [found[row.index] for row in rows]
    return teacher_prompt_columns(prompts, int(tokenizer.pad_token_id))
