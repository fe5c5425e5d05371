"""Prompts through the model, in pieces where they are long: what a layer computes of all positions
at once needs more memory than the keys and values that are kept of them.

    cache  [ kept | piece | piece | piece ]──▶ logits behind the last token

Where products want sizes that come again, prompts are read with a few positions more: of padding,
or of what was kept.
"""

from __future__ import annotations

import torch
from torch import nn

from rllib_llm.engines.decode_step import last_logits
from rllib_llm.engines.kv_cache import RepeatedPromptCache, SharedPromptCache
from rllib_llm.modules.packing.dense_packing import recurring_size

# Tokens of all prompts in a piece: enough for a GPU to be busy with.
PIECE_TOKENS = 16_384


def recurring_length(num_prompts: int, length: int) -> int:
    """`length` positions or a few more, of which so many prompts have a `recurring_size` of tokens
    together; `length` where 15 or an eighth more do not suffice."""
    most = length + max(15, length // 8)
    for longer in range(length, most + 1):
        if recurring_size(num_prompts * longer) == num_prompts * longer:
            return longer
    return length


def prefill(
    model: nn.Module,
    value_head: nn.Module | None,
    ids: torch.Tensor,
    mask: torch.Tensor,
    cache: SharedPromptCache | RepeatedPromptCache,
    start: int = 0,
    piece_tokens: int = PIECE_TOKENS,
) -> torch.Tensor:
    """Logits [prompts, vocab] behind the prompts' last tokens; the cache holds the prompts
    afterwards. With a value head as `last_logits`.

    Args:
        model: causal LM of transformers.
        value_head: see `last_logits`.
        ids: [prompts, P] int64, left-padded.
        mask: [prompts, P] bool, True where a prompt token stands.
        cache: with room for P positions, of which it holds the first `start`.
        start: positions that were computed before.
        piece_tokens: that go through the model at once, in all prompts together; a piece has one
            position of each prompt at least. Changes memory, and numbers by round-off.
    """
    end = ids.shape[1]
    # transformers' own layers may not go on with several positions.
    step = end if isinstance(cache, RepeatedPromptCache) else max(1, piece_tokens // len(ids))
    positions = (mask.long().cumsum(dim=1) - 1).clamp_(min=0)
    has_padding = not bool(mask.all())
    for first in range(start, end, step):
        last = min(first + step, end)
        logits = last_logits(
            model,
            value_head,
            input_ids=ids[:, first:last],
            attention_mask=mask[:, :last] if has_padding else None,
            position_ids=positions[:, first:last],
            past_key_values=cache,
        )
    return logits
