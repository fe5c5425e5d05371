"""Completions as an environment's actions, their conversion to text, and checks of the
environment's answers.

An environment that answers within a completion, as a tool does, marks with `loss_mask` in the infos
of `step` which tokens the policy sampled. All else about them has defaults.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rllib_llm.data.encoding import end_ids
from rllib_llm.shared import columns
from rllib_llm.shared.columns import NO_VERSION, pad_right
from rllib_llm.shared.errors import Problem, Problems, report, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def decode_completions(
    tokenizer: PreTrainedTokenizerBase, last_prompt_ids: Sequence[int],
    completions: Sequence[Sequence[int]],
) -> list[str]:  # fmt: skip
    """Text of each completion as it follows its prompt, without the tokens that end it. Other
    special tokens are shown: <think> may be one that a reward looks for.

    Many tokenizers drop the space before the first word they decode. Decoding after the prompt's
    last token keeps it, so that prompt + completion reads as one text.
    """
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    is_end = end_ids(tokenizer).__contains__
    completions = [[*itertools.dropwhile(is_end, ids[::-1])][::-1] for ids in completions]
    lasts = list(dict.fromkeys(last_prompt_ids))
    decoded = tokenizer.batch_decode([[last] for last in lasts], **options)
    texts_of = dict(zip(lasts, decoded, strict=True))
    heads = [texts_of[last] for last in last_prompt_ids]
    joined = [[last, *ids] for last, ids in zip(last_prompt_ids, completions, strict=True)]
    texts = tokenizer.batch_decode(joined, **options)
    special = {*tokenizer.all_special_ids}
    alone = [i for i, text in enumerate(texts)
             if last_prompt_ids[i] in special or not text.startswith(heads[i])]  # fmt: skip
    cut = [text.removeprefix(head) for text, head in zip(texts, heads, strict=True)]
    for i in alone:  # the two tokens are parts of one character, or the first has no text
        cut[i] = str(tokenizer.decode(list(completions[i]), **options))
    return cut


def pad_completions(
    completions: Sequence[Sequence[int]], pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Actions {completion_ids, completion_mask} of lists of token ids."""
    ids, mask = pad_right(completions, pad_token_id)
    return {columns.COMPLETION_IDS: ids, columns.COMPLETION_MASK: mask}


def check_actions(
    actions: Mapping[str, torch.Tensor], *, batch_size: int, max_len: int, vocab_size: int,
    needs_logprobs: bool = False, device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The actions on `device`, after checks of names, types, shapes, masks and ids.

    Raises:
        Problems: what does not fit.
    """
    given = actions if isinstance(actions, Mapping) else {}
    dtypes = {columns.COMPLETION_IDS: torch.int64, columns.COMPLETION_MASK: torch.bool}
    if needs_logprobs or columns.SAMPLER_LOGPROBS in given:
        dtypes[columns.SAMPLER_LOGPROBS] = torch.float32
    missing = [name for name in dtypes if name not in given]
    require(not missing, "actions", [*given] or type(actions), f"be a dict with {[*dtypes]}",
            f"{missing} lack")  # fmt: skip
    shape = list(getattr(given[columns.COMPLETION_IDS], "shape", []))
    num_tokens = shape[1] if len(shape) == 2 else None
    sizes = (batch_size, num_tokens)
    report(filter(None, (misfit(name, given[name], kind, sizes) for name, kind in dtypes.items())))
    require(
        1 <= shape[1] <= max_len, "completion_ids", shape, f"be 1 to {max_len} tokens long",
        "the action space says so", "Stop at max_completion_len",
    )  # fmt: skip
    checked = {name: given[name].to(device) for name in dtypes}
    ids, mask = checked[columns.COMPLETION_IDS], checked[columns.COMPLETION_MASK]
    ragged = (mask[:, 1:] & ~mask[:, :-1]).any(1, keepdim=True) | ~mask[:, :1]
    outside = (ids < 0) | (ids >= vocab_size)
    if not bool((ragged | outside).any()):  # one synchronisation with the device
        return checked
    if (row := _first_row(ragged)) is not None:
        raise Problems(
            f"completion_mask[{row}]", "be True for the first tokens, at least one, then False",
            "completions are right-padded", value=mask[row].int().tolist(),
        )  # fmt: skip
    row = _first_row(outside)
    raise Problems(
        f"completion_ids[{row}]", f"have ids in 0..{vocab_size - 1}",
        "the vocabulary has no others", "Set vocab_size to the model's",
        ids[row][outside[row]].tolist(),
    )  # fmt: skip


_DTYPES = {
    columns.LOSS_MASK: torch.bool, columns.WEIGHTS_VERSION: torch.int32, columns.GROUP: torch.int64,
}  # fmt: skip


def info_columns(
    infos: Mapping[str, Any], completion_mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The columns `loss_mask` [B, T] bool, `weights_version` [B, T] int32 and `group` [B] int64
    that `infos` contains, checked against `completion_mask` [B, T].

    Raises:
        Problems: one has another type or shape; a row without a sampled token, or a sampled one
            that does not exist; a version of a token that was not sampled.
    """
    found = {name: infos[name] for name in _DTYPES if name in infos}
    for name, column in found.items():
        shape = completion_mask.shape[:1] if name == columns.GROUP else completion_mask.shape
        report(filter(None, [misfit(f"infos[{name!r}]", column, _DTYPES[name], shape)]))
    if not found:
        return found
    sampled = found.get(columns.LOSS_MASK, completion_mask)
    for broken, rule, reason in (
        (sampled & ~completion_mask, "be False where completion_mask is",
         "the policy sampled only what exists"),
        (~sampled.any(1, keepdim=True), "be True somewhere",
         "the score belongs to the last sampled token; other rows have infos['valid'] False"),
    ):  # fmt: skip
        if (row := _first_row(broken)) is not None:
            name = f"infos[{columns.LOSS_MASK!r}][{row}]"
            raise Problems(name, rule, reason, value=sampled[row].int().tolist())
    versions = found.get(columns.WEIGHTS_VERSION)
    require(
        not (versions is not None and bool((versions[~sampled] != NO_VERSION).any())),
        f"infos[{columns.WEIGHTS_VERSION!r}]", ..., f"be {NO_VERSION} where nothing was sampled",
        "the age of a batch is counted over sampled tokens",
        f"Use torch.where(loss_mask, versions, {NO_VERSION})",
    )  # fmt: skip
    return found


def misfit(
    where: str, value: Any, dtype: torch.dtype, shape: Sequence[int | None]
) -> Problem | None:
    """The problem of an answer that is no tensor of dtype and shape (None: any size)."""
    arrived = f"it is of type {type(value).__name__}"
    if isinstance(value, torch.Tensor):
        sizes = [n if s is None else s for s, n in zip(shape, value.shape, strict=False)]
        if value.dtype == dtype and len(value.shape) == len(shape) and sizes == [*value.shape]:
            return None
        arrived = f"it is of {value.dtype}, shape {list(value.shape)}"
    wanted = ["any" if size is None else size for size in shape]
    return Problem(where, f"be a torch tensor of {dtype}, shape {wanted}", arrived)


def _first_row(flags: torch.Tensor) -> int | None:
    """The first row with a True in it, None where there is none."""
    rows = flags.any(1)
    return int(rows.int().argmax()) if bool(rows.any()) else None


@dataclass(frozen=True)
class Judgement:
    """An environment's scores and infos of B completions.

    rewards: [B] float32, its own. columns: those of the training batch. components, metrics: [B]
    float32 by name; of a conversation NaN in all rows of a rollout but its first, so that a mean
    counts each rollout once. texts: {"prompt", "completion"}, where it gave them, "messages" of
    conversations, "turns" (a prompt for people) and "question" (the last user's words) of chats.
    cause: what was raised where none of them could be judged.
    """

    rewards: torch.Tensor
    columns: dict[str, torch.Tensor]
    components: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)
    cause: str = ""
