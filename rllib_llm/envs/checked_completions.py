"""Completions as they reach an environment: checked, and turned back into text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rllib_llm.shared import columns
from rllib_llm.shared.padding import pad_right


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
    texts_of = dict(
        zip(lasts, tokenizer.batch_decode([[i] for i in lasts], **options), strict=True)
    )
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
    num_tokens = shape[1] if len(shape) == 2 else max_len
    for name, dtype in zip(wanted, dtypes, strict=False):
        _check_tensor(name, actions[name], dtype, (batch_size, num_tokens), max_len)
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


def _check_tensor(
    name: str, value: Any, dtype: torch.dtype, shape: tuple[int, int], max_len: int
) -> None:
    if not isinstance(value, torch.Tensor) or value.dtype != dtype:
        arrived = getattr(value, "dtype", type(value).__name__)
        raise BanditEnvError(
            f"{name} of {arrived} must be a torch tensor of {dtype}: nothing is converted behind "
            "your back. Convert it."
        )
    if tuple(value.shape) != shape or not 1 <= value.shape[1] <= max_len:
        raise BanditEnvError(
            f"{name} of shape {list(value.shape)} must be [{shape[0]}, T], 1 <= T <= {max_len}, "
            f"the same for all: one completion for each of the {shape[0]} prompt rows handed out "
            "last. Answer the last observation, and stop at max_completion_len."
        )
