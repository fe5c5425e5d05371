"""Tiny random causal language models of many families, with weights large enough to matter."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.tiny_models import copied

VOCAB = 97
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
FAMILIES = {
    "llama": _LLAMA,
    "qwen2 (tied)": {**_LLAMA, "tie_word_embeddings": True},
    "qwen3": {**_LLAMA, "head_dim": 16},
    "mistral (sliding window)": {**_LLAMA, "sliding_window": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "gemma2 (soft-cap)": {**_LLAMA, "head_dim": 16, "final_logit_softcapping": 3.0},
    "cohere (logit scale)": {**_LLAMA, "logit_scale": 0.3},
    "granite (logits scaling)": {**_LLAMA, "logits_scaling": 0.7},
    "phi (head bias)": {**_LLAMA, "num_key_value_heads": 2},
    "opt (decoder inside the trunk)": {
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 16,
    },
    "bloom (alibi)": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
}


def tiny_model(family: str = "llama", seed: int = 0, **overrides) -> PreTrainedModel:
    """A model of one of FAMILIES, or of a type that has a Llama's settings, in eval mode; its
    logits are spread over several nats. Torch's random state is that after drawing it."""

    def drawn() -> tuple[PreTrainedModel, torch.Tensor]:
        torch.manual_seed(seed)
        config = AutoConfig.for_model(
            family.split()[0],
            vocab_size=VOCAB,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **{**FAMILIES.get(family, _LLAMA), **overrides},
        )
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                # Random biases too: a zero bias that is left out would not show.
                parameter.copy_(parameter * 3 + 0.1 * torch.randn_like(parameter))
        return model, torch.get_rng_state()

    model, state = copied(drawn, "tiny_model", family, seed, repr(overrides))
    torch.set_rng_state(state)
    return model
