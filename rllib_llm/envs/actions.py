"""Completions as an environment's actions, their conversion to text, and checks of the
environment's answers.

An environment that answers within a completion, as a tool does, says with `loss_mask` in the infos
of `step` which tokens the policy sampled. All else about them has defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rllib_llm.shared import columns
from rllib_llm.shared.columns import NO_VERSION, pad_right

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class BanditEnvError(ValueError):
    """An action, option or setting that does not fit the environment."""


def decode_completions(
    tokenizer: PreTrainedTokenizerBase,
    last_prompt_ids: Sequence[int],
    completions: Sequence[Sequence[int]],
) -> list[str]:
    """Text of each completion as it follows its prompt, special tokens left out.

    Many tokenizers drop the space before the first word they decode. Decoding behind the prompt's
    last token keeps it, so that prompt + completion reads as one text.
    """
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    lasts = list(dict.fromkeys(last_prompt_ids))
    decoded = tokenizer.batch_decode([[last] for last in lasts], **options)
    texts_of = dict(zip(lasts, decoded, strict=True))
    heads = [texts_of[last] for last in last_prompt_ids]
    joined = [[last, *ids] for last, ids in zip(last_prompt_ids, completions, strict=True)]
    texts = tokenizer.batch_decode(joined, **options)
    alone = [i for i, text in enumerate(texts) if not text.startswith(heads[i])]
    cut = [text.removeprefix(head) for text, head in zip(texts, heads, strict=True)]
    for i in alone:  # the two tokens are parts of one character
        cut[i] = str(tokenizer.decode(list(completions[i]), **options))
    return cut


def pad_completions(
    completions: Sequence[Sequence[int]], pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Actions {completion_ids, completion_mask} of lists of token ids."""
    ids, mask = pad_right(completions, pad_token_id)
    return {columns.COMPLETION_IDS: ids, columns.COMPLETION_MASK: mask}


def check_actions(
    actions: Mapping[str, torch.Tensor],
    *,
    batch_size: int,
    max_len: int,
    vocab_size: int,
    needs_logprobs: bool = False,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """The actions on `device`, after checks of names, types, shapes, masks and ids.

    Raises:
        BanditEnvError: says what arrived, what is allowed and what to do.
    """
    wanted = [columns.COMPLETION_IDS, columns.COMPLETION_MASK]
    if needs_logprobs or (isinstance(actions, Mapping) and columns.SAMPLER_LOGPROBS in actions):
        wanted.append(columns.SAMPLER_LOGPROBS)
    for name in wanted:
        if not isinstance(actions, Mapping) or name not in actions:
            arrived = list(actions) if isinstance(actions, Mapping) else type(actions).__name__
            raise BanditEnvError(
                f"actions={arrived!r} must be a dict with {name!r}: it is missing. Pass {wanted}."
            )
    dtypes = (torch.int64, torch.bool, torch.float32)
    shape = list(getattr(actions[columns.COMPLETION_IDS], "shape", []))
    num_tokens = shape[1] if len(shape) == 2 else None
    for name, dtype in zip(wanted, dtypes, strict=False):
        if problem := misfit(name, actions[name], dtype, (batch_size, num_tokens)):
            raise BanditEnvError(problem)
    if not 1 <= shape[1] <= max_len:
        raise BanditEnvError(
            f"completion_ids of {shape[1]} columns must be 1 to {max_len} tokens long: the action "
            "space holds no longer completions. Stop at max_completion_len."
        )
    checked = {name: actions[name].to(device) for name in wanted}
    ids, mask = checked[columns.COMPLETION_IDS], checked[columns.COMPLETION_MASK]
    ragged = (mask[:, 1:] & ~mask[:, :-1]).any(-1) | ~mask[:, 0]
    outside = ((ids < 0) | (ids >= vocab_size)).any(-1)
    if not bool((ragged | outside).any()):  # one synchronisation with the device
        return checked
    if bool(ragged.any()):
        row = int(ragged.nonzero()[0])
        raise BanditEnvError(
            f"completion_mask[{row}]={mask[row].int().tolist()} must be True for the first tokens "
            "(at least one) and False after them: completions are right-padded. Move the padding "
            "to the right."
        )
    row = int(outside.nonzero()[0])
    bad = [token for token in ids[row].tolist() if not 0 <= token < vocab_size]
    raise BanditEnvError(
        f"completion_ids[{row}] with id {bad[0]} must lie in 0..{vocab_size - 1}: the vocabulary "
        f"has {vocab_size} tokens. Sample from it, or set vocab_size to the model's."
    )


_DTYPES = {
    columns.LOSS_MASK: torch.bool,
    columns.WEIGHTS_VERSION: torch.int32,
    columns.GROUP: torch.int64,
}


def told_columns(
    infos: Mapping[str, Any], completion_mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The columns `loss_mask` [B, T] bool, `weights_version` [B, T] int32 and `group` [B] int64
    that `infos` contains, checked against `completion_mask` [B, T].

    Raises:
        BanditEnvError: one has another type or shape; a row without a sampled token, or a sampled
            one that does not exist; a version of a token that was not sampled.
    """
    told = {name: infos[name] for name in _DTYPES if name in infos}
    for name, column in told.items():
        _check_column(name, column, completion_mask)
    if not told:
        return told
    sampled = told.get(columns.LOSS_MASK, completion_mask)
    where = f"infos[{columns.LOSS_MASK!r}]"
    if (row := _first_row(sampled & ~completion_mask)) is not None:
        raise BanditEnvError(
            f"{where}[{row}]={sampled[row].int().tolist()} must be False where completion_mask is, "
            f"{completion_mask[row].int().tolist()}: the policy sampled only what exists. Combine "
            "it with completion_mask."
        )
    empty = ~sampled.any(1, keepdim=True)
    if (row := _first_row(empty)) is not None:
        raise BanditEnvError(
            f"{where}[{row}]={sampled[row].int().tolist()} must be True somewhere: the score "
            "belongs to the last sampled token. Give such a row infos['valid'] False instead."
        )
    versions = told.get(columns.WEIGHTS_VERSION)
    if versions is not None and bool((versions[~sampled] != NO_VERSION).any()):
        raise BanditEnvError(
            f"infos[{columns.WEIGHTS_VERSION!r}] must be {NO_VERSION} where nothing was sampled: "
            "the age of a batch is counted over sampled tokens. Use "
            f"torch.where(loss_mask, versions, {NO_VERSION})."
        )
    return told


def _check_column(name: str, column: Any, completion_mask: torch.Tensor) -> None:
    shape = completion_mask.shape[:1] if name == columns.GROUP else completion_mask.shape
    if problem := misfit(f"infos[{name!r}]", column, _DTYPES[name], shape):
        raise BanditEnvError(problem)


def misfit(where: str, value: Any, dtype: torch.dtype, shape: Sequence[int | None]) -> str:
    """Why an environment's answer is no tensor of dtype and shape (None: any size); "" if it is."""
    arrived = f"type {type(value).__name__}"
    if isinstance(value, torch.Tensor):
        sizes = [n if s is None else s for s, n in zip(shape, value.shape, strict=False)]
        if value.dtype == dtype and len(value.shape) == len(shape) and sizes == [*value.shape]:
            return ""
        arrived = f"{value.dtype}, shape {list(value.shape)}"
    wanted = ["any" if size is None else size for size in shape]
    return (
        f"{where} of {arrived} must be a torch tensor of {dtype}, shape {wanted}: each row belongs "
        "to an episode of the batch. Give such a tensor."
    )


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
