"""Preference pairs as token batches, for reward models and for direct preference optimisation.

A row is {"chosen", "rejected"} and maybe "prompt": texts, or lists of chat messages. Where there is
no prompt, or where chats repeat it, what both begin with is the prompt. Of rollouts the best and
the worst completion of each group are a pair. `pairs_from_labels` makes pairs of rows that carry a
label, such as reviews with a sentiment or a rating.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rllib_llm.data.encoding import (
    Part,
    as_turns,
    common_prefix_len,
    encode_chat,
    encode_ended,
    encode_judged_chat,
    encode_whole,
    keep_end,
    row_settings,
)
from rllib_llm.data.image_prompts import images_of_row
from rllib_llm.data.rollouts import pairs_of_rollouts
from rllib_llm.data.rows import EpochOrder, Rows, require_columns
from rllib_llm.data.sources import Source, load_rows
from rllib_llm.data.texts import BatchSource, TokenizedText
from rllib_llm.modules.images import image_columns
from rllib_llm.shared import columns
from rllib_llm.shared.columns import pad_left, pad_right
from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import Problems, nearest, require


class PreferenceSource(BatchSource):
    """Batches of pairs by position; subclasses say in which columns. `settings`: of `BatchSource`.

    Pairs whose chosen and rejected texts are the same express no preference: they are left out,
    with a warning that counts them.

    Raises:
        Problems: no rows, a row without a text of either kind, or no pair that differs.
    """

    _lost = "beginning"
    _texts_of_row = 2
    _takes_labels = False  # whether rows may be a completion with a label

    def __init__(self, data: Source, **settings: Any) -> None:
        rows = pairs_of_rollouts(load_rows(data))
        self.is_unpaired = self._takes_labels and {*LABELLED} <= {*rows.columns} - {"chosen"}
        for index, label in enumerate(rows.column("label") if self.is_unpaired else ()):
            require(label in (True, False), f"row {index} of {rows.description}: label", label,
                    "be true or false", "it says whether the completion is wanted")  # fmt: skip
        self._members = np.arange(len(rows)) if self.is_unpaired else _telling_pairs(rows)
        super().__init__(rows, len(self._members), **settings)

    def _of_index(self, index: int) -> tuple[Any, ...]:
        return self._of_row(int(self._members[index]))

    def _examples(self, row: dict[str, Any]) -> list[tuple[Any, ...]]:
        """See `_example`, of the chosen and of the rejected completion of a row with images."""
        pair = [self._example({**row, "completion": row[name], "messages": None})
                for name in ("chosen", "rejected")]  # fmt: skip
        self.num_cut += sum(len(ids) > self._max_length for ids, *_ in pair)
        return pair

    def _answers(self, chosen: list[Any], rejected: list[Any]) -> dict[str, torch.Tensor]:
        pad = self._tokenizer.pad_token_id
        chosen_ids, chosen_mask = pad_right(chosen, pad)
        rejected_ids, rejected_mask = pad_right(rejected, pad)
        return {
            columns.CHOSEN_IDS: chosen_ids, columns.CHOSEN_MASK: chosen_mask,
            columns.REJECTED_IDS: rejected_ids, columns.REJECTED_MASK: rejected_mask,
        }  # fmt: skip


class PairSource(PreferenceSource):
    """Whole texts (prompt and answer) for a reward model: `chosen_ids`, `chosen_mask`,
    `rejected_ids`, `rejected_mask`, each [count, L], right-padded. Long texts are truncated at the
    start; those with images, at their end."""

    def _encode(self, row: dict[str, Any], part: Part | None = None) -> tuple[Any, ...]:
        if images_of_row(row):
            (chosen, _, seen), (rejected, *_) = self._examples(row)
            return chosen[: self._max_length], rejected[: self._max_length], seen
        is_stored = self._is_stored(row, "chosen_")
        chosen, rejected = (
            [*row["prompt_ids"], *row[f"{name}_completion_ids"]] if is_stored
            else self._tokenize(row, row[name]) for name in ("chosen", "rejected")
        )  # fmt: skip
        return self._cut(chosen), self._cut(rejected), {}

    def _cut(self, ids: list[int]) -> list[int]:
        self.num_cut += len(ids) > self._max_length
        starts = (self._tokenizer.bos_token_id, self._tokenizer.cls_token_id)
        return keep_end(ids, self._max_length, starts)

    def _tokenize(self, row: dict[str, Any], answer: Any) -> list[int]:
        prompt = row.get("prompt")
        if _is_chat(prompt, answer):
            turns = as_turns(prompt, answer)[0]
            return encode_judged_chat(self._tokenizer, turns, **row_settings(row))
        if self._tokenizer.eos_token_id is None:  # an encoder's: it puts its own end
            return encode_whole(self._tokenizer, (prompt or "") + answer)
        return encode_ended(self._tokenizer, prompt or "", answer)[0]

    def columns(self, encoded: list[tuple[Any, ...]]) -> dict[str, torch.Tensor]:
        chosen, rejected, seen = zip(*encoded, strict=True)
        return {**self._answers([*chosen], [*rejected]), **image_columns(seen)}


class PromptedPairSource(PreferenceSource):
    """Prompts and what follows them, as a policy writes it: `prompt_ids` and `prompt_mask`
    [count, P], left-padded; of both answers ids, mask and loss mask [count, T], right-padded.

    The prompt is what both texts have in common up to the answers, so that a model reads it once.
    A pair longer than `max_length` first loses the beginning of its prompt, of which at least half
    of `max_length` stays, then the ends of its answers.

    Rows {"prompt", "completion", "label"} (TRL's, for KTO) have one answer, chosen where the label
    is true; the other is empty.
    """

    _lost = "prompt's beginning, then their end"
    _takes_labels = True

    def _encode(self, row: dict[str, Any], part: Part | None = None) -> tuple[Any, ...]:
        if self.is_unpaired:
            answer = row["completion"]
            pair = self._encode_pair({**row, "chosen": answer, "rejected": answer})
            absent = (2, 4) if row["label"] else (1, 3)
            return tuple([] if at in absent else ids for at, ids in enumerate(pair))
        return self._encode_pair(row)

    def _encode_pair(self, row: dict[str, Any]) -> tuple[Any, ...]:
        """Ids of the prompt and both answers, which of the latter are learnt from, and what the
        prompt shows."""
        if images_of_row(row):
            pair = self._examples(row)
            border = pair[0][1].index(True)
            prompt, rest = pair[0][0][:border], slice(border, self._max_length)
            return prompt, *(own[at][rest] for at in (0, 1) for own in pair), pair[0][2]
        if self._is_stored(row, "chosen_"):
            prompt = list(row["prompt_ids"])
            chosen, rejected = (_sampled(row, prompt, name) for name in ("chosen", "rejected"))
            border = len(prompt)
        else:
            is_chat = _is_chat(row.get("prompt"), row["chosen"])
            chosen, rejected, border = (self._encode_chats if is_chat else self._encode_texts)(row)
            border = min(border, common_prefix_len(chosen[0], rejected[0]))
        prompt = chosen[0][:border]
        require(prompt, "a pair", ..., "have a prompt, or texts that begin alike",
                "the tokenizer has no BOS", "Add the column 'prompt'")  # fmt: skip
        answers = [chosen[0][border:], rejected[0][border:]]
        longest = max(map(len, answers))
        if len(prompt) + longest > self._max_length:
            self.num_cut += sum(len(prompt) + len(ids) > self._max_length for ids in answers)
            room = max(self._max_length - longest, self._max_length // 2)
            prompt = keep_end(prompt, room, (self._tokenizer.bos_token_id,))
            answers = [ids[: self._max_length - len(prompt)] for ids in answers]
        masks = (own[border:][: len(ids)] for (_, own), ids in
                 zip((chosen, rejected), answers, strict=True))  # fmt: skip
        return prompt, *answers, *masks, {}

    def _encode_texts(self, row: dict[str, Any]) -> tuple[TokenizedText, TokenizedText, int]:
        """Ids and mask of both texts, and where their answers begin, as far as the row shows it."""
        prompt = row.get("prompt") or ""
        (chosen, border), (rejected, other_border) = (
            encode_ended(self._tokenizer, prompt, row[name]) for name in ("chosen", "rejected")
        )
        end = min(border, other_border) if prompt else len(chosen)
        return (chosen, [True] * len(chosen)), (rejected, [True] * len(rejected)), end

    def _encode_chats(self, row: dict[str, Any]) -> tuple[TokenizedText, TokenizedText, int]:
        prompt, settings = row.get("prompt"), row_settings(row)
        one, num_prompt_turns = as_turns(prompt, row["chosen"])
        other, num_other = as_turns(prompt, row["rejected"])
        answers = [*one[num_prompt_turns:], *other[num_other:]]
        is_same_prompt = one[:num_prompt_turns] == other[:num_other]
        require(
            is_same_prompt and all(turn["role"] == "assistant" for turn in answers),
            "chosen and rejected messages", ..., "answer the same prompt, with nothing but turns "
            "of the assistant", "", "Put all turns before the answer into 'prompt'",
        )  # fmt: skip
        chosen = encode_chat(self._tokenizer, one, num_prompt_turns, **settings)
        rejected = encode_chat(self._tokenizer, other, num_other, **settings)
        return chosen, rejected, min(own.index(True) for _, own in (chosen, rejected))

    def columns(self, encoded: list[tuple[Any, ...]]) -> dict[str, torch.Tensor]:
        pad = self._tokenizer.pad_token_id
        prompts, prompt_mask = pad_left([pair[0] for pair in encoded], pad)
        learnt = {
            name: pad_right([pair[at] for pair in encoded], False, torch.bool)[0]
            for at, name in ((3, columns.CHOSEN_LOSS_MASK), (4, columns.REJECTED_LOSS_MASK))
        }
        answers = self._answers([pair[1] for pair in encoded], [pair[2] for pair in encoded])
        answers |= image_columns([pair[5] for pair in encoded])
        return {**learnt, columns.PROMPT_IDS: prompts, columns.PROMPT_MASK: prompt_mask, **answers}


def _sampled(row: dict[str, Any], prompt: list[int], name: str) -> TokenizedText:
    """Ids of a prompt and its stored completion, and which of the latter the policy sampled."""
    ids = list(row[f"{name}_completion_ids"])
    own = list(row[f"{name}_loss_mask"] or [True] * len(ids))
    return prompt + ids, [False] * len(prompt) + own


def _is_chat(prompt: Any, answer: Any) -> bool:
    return isinstance(answer, list) or isinstance(prompt, list)


LABELLED = ("prompt", "completion", "label")


def _telling_pairs(rows: Rows) -> np.ndarray:
    """Indices [pairs] int64 of the rows whose two texts differ."""
    for name in ("chosen", "rejected"):
        near = nearest(name, rows.columns, 1)
        what = f"Rename {near[0]!r} to {name!r}" if near else "Rename a column"
        require(
            name in rows.columns, "data", rows.description,
            "have the columns 'chosen' and 'rejected' (and 'prompt', where they lack it)",
            f"it has {sorted(rows.columns)}", f"{what}, or make pairs with pairs_from_labels",
        )  # fmt: skip
    chosen, rejected = rows.column("chosen"), rows.column("rejected")
    for index, pair in enumerate(zip(chosen, rejected, strict=True)):
        if not all(isinstance(text, str) or (isinstance(text, list) and text) for text in pair):
            found = f"they are {str(pair[0])[:40]!r} and {str(pair[1])[:40]!r}"
            rule = "have text or messages as 'chosen' and 'rejected'"
            raise Problems(f"row {index} of {rows.description}", rule, found, "Drop the row")
    differ = [index for index, (a, b) in enumerate(zip(chosen, rejected, strict=True)) if a != b]
    require(differ, "data", rows.description, "have pairs whose chosen and rejected texts differ",
            f"all {len(rows)} are the same", "Check the columns")  # fmt: skip
    if len(differ) < len(rows):
        warnings.warn(
            f"{len(rows) - len(differ)} of {len(rows)} pairs of {rows.description} are left out: "
            "their chosen and rejected texts are the same.",
            stacklevel=4,
        )
    return np.array(differ, dtype=np.int64)


def pairs_from_labels(
    path: Source, *, text_column: str = "text", label_column: str = "label",
    num_pairs: int | None = None, seed: int = 0,
    rewrite: str | Callable[[str], str] | None = None,
) -> list[dict[str, str]]:  # fmt: skip
    """Rows {"chosen", "rejected"}: a text of a higher label and one of a lower label.

    Texts of each label are drawn in a seeded order, each once before any is drawn again; with more
    than two labels every two of them take turns. The same arguments give the same pairs.

    In YAML: `data: {path: rllib_llm.data.preferences.pairs_from_labels, kwargs: {path: FILE}}`.

    Args:
        path: any source of `load_rows`.
        text_column, label_column: columns of the text and of its label, a number (or true, false).
        num_pairs: how many; None: until the texts of the commonest label have all been drawn once.
        seed: of the order, 0 or more.
        rewrite: function of a text, or its dotted path, applied to every text: e.g. one that joins
            the tokens as which some corpora store their texts.

    Raises:
        Problems: no such column, a label that is no number, only one label, or `num_pairs` below 1.
    """
    require(num_pairs is None or num_pairs >= 1, "num_pairs", num_pairs, "be at least 1, or null",
            "", "Leave it out to draw every text once")  # fmt: skip
    rows = load_rows(path)
    require_columns(rows, [text_column, label_column])
    groups: dict[float, list[str]] = {}
    for number, row in enumerate(rows):
        label, text = row[label_column], row[text_column]
        is_number = isinstance(label, int | float) and math.isfinite(label)
        where = f"row {number} of {rows.description}"
        require(is_number, f"{where}: {label_column}", label, "be a finite number",
                "the higher one's text is chosen", "Write labels as numbers")  # fmt: skip
        require(isinstance(text, str), f"{where}: {text_column}", text, "be text", "", "")
        groups.setdefault(float(label), []).append(text)
    require(len(groups) > 1, f"{label_column} of {rows.description}", ...,
            "hold at least two different labels", f"all {len(rows)} rows have {[*groups]}",
            "Name the column of the labels")  # fmt: skip
    change = import_dotted(rewrite, name="rewrite") if isinstance(rewrite, str) else rewrite
    if change is not None:
        groups = {label: [change(text) for text in texts] for label, texts in groups.items()}
    matches = list(itertools.combinations(sorted(groups), 2))  # (lower, higher)
    if num_pairs is None:
        num_turns = math.ceil(max(map(len, groups.values())) / (len(groups) - 1))
        num_pairs = num_turns * len(matches)
    draws = {label: _draws(texts, seed) for label, texts in groups.items()}
    return [
        {"chosen": next(draws[higher]), "rejected": next(draws[lower])}
        for lower, higher in itertools.islice(itertools.cycle(matches), num_pairs)
    ]


def _draws(texts: list[str], seed: int):
    order = EpochOrder(len(texts), seed)
    for position in itertools.count():
        yield texts[int(order.indices(position, 1)[0])]
