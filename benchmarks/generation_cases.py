"""Random models and prompts that engines are compared on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

PAD, STOP = 0, 2


@dataclass(frozen=True)
class Case:
    """A model and a batch; `mean_len` tokens is the mean completion where a stop token ends it, and
    the first `short` prompts have `short_len` tokens."""

    hidden: int
    layers: int
    vocab: int
    groups: int = 8
    num_completions: int = 8
    prompt_len: int = 32
    completion_len: int = 64
    mean_len: int | None = None
    ragged: bool = False
    key_value_heads: int | None = None
    max_rows: int | None = None
    short: int = 0
    short_len: int = 16
    intermediate: int | None = None
    tied: bool = False


CASES = {
    "5m_full": Case(256, 4, 2048),
    "5m_mixed": Case(256, 4, 2048, mean_len=21),
    "5m_ragged": Case(256, 4, 2048, mean_len=21, ragged=True),
    "5m_gqa": Case(256, 4, 2048, key_value_heads=2),
    "5m_places": Case(256, 4, 2048, groups=32, mean_len=21, max_rows=64),
    "5m_unlike": Case(256, 4, 2048, groups=52, num_completions=1, prompt_len=1500, short=48),
    "80m_full": Case(768, 6, 16384, groups=4, completion_len=32),
    "80m_mixed": Case(768, 6, 16384, groups=4, mean_len=21),
    # The shape of SmolLM2-135M.
    "135m_full": Case(
        576, 30, 49_152, key_value_heads=3, intermediate=1536, tied=True, prompt_len=64,
        completion_len=32,
    ),
    "500m_full": Case(
        896, 24, 151_936, groups=32, prompt_len=128, completion_len=256, key_value_heads=2
    ),
    "500m_mixed": Case(
        896, 24, 151_936, groups=32, prompt_len=128, completion_len=256, key_value_heads=2,
        mean_len=85, ragged=True,
    ),
}  # fmt: skip


def build_model(case: Case, device: str, dtype: torch.dtype) -> nn.Module:
    """A random Llama; with `mean_len`, its stop token always has the probability 1 / mean_len."""
    torch.manual_seed(0)
    heads = case.hidden // 64
    config = LlamaConfig(
        vocab_size=case.vocab,
        hidden_size=case.hidden,
        intermediate_size=case.intermediate or 4 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=heads,
        num_key_value_heads=case.key_value_heads or heads,
        max_position_embeddings=2048,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=STOP,
        tie_word_embeddings=case.tied,
    )
    model = LlamaForCausalLM(config)
    if case.mean_len is not None:
        bias = torch.zeros(case.vocab)
        bias[STOP] = math.log(case.vocab / (case.mean_len - 1))
        model.lm_head.bias = nn.Parameter(bias)
    return model.to(device=device, dtype=dtype).eval()


def build_prompts(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts and their mask [groups, prompt_len], left-padded where `ragged` or short."""
    generator = torch.Generator().manual_seed(1)
    shape = (case.groups, case.prompt_len)
    ids = torch.randint(3, case.vocab, shape, generator=generator)
    mask = torch.ones(shape, dtype=torch.bool)
    if case.ragged:
        lengths = torch.linspace(case.prompt_len // 2, case.prompt_len, case.groups).long()
        mask = torch.arange(case.prompt_len) >= case.prompt_len - lengths[:, None]
    mask[: case.short, : case.prompt_len - case.short_len] = False
    return ids.masked_fill(~mask, PAD).to(device), mask.to(device)
