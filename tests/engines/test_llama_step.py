"""The short decode step gives the logits of transformers' own modules."""

from __future__ import annotations

import contextlib
import copy
import types

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import LlamaForCausalLM

from rllib_llm.engines import llama_step
from rllib_llm.engines.kv_cache import SharedPromptCache
from rllib_llm.engines.llama_step import LlamaStep, is_llama_shaped
from rllib_llm.modules.lora import adapters_off, add_adapters
from rllib_llm.modules.precision import cast_parameters_
from tests.crossed import crossed
from tests.modules.tiny_models import VOCAB, tiny_model
from tests.rounding import assert_as_near

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8,
}  # fmt: skip
CASES = {
    "grouped key heads": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "one head per key": ("llama", {"num_key_value_heads": 2}),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "scaled rotation": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "tied head, query biases": ("qwen2 (tied)", {}),
    "some layers slide": (
        "qwen2 (tied)",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "all layers slide": ("mistral (sliding window)", {}),
    "normed queries, wide heads": ("qwen3", {}),
}


@pytest.fixture(autouse=True)
def aligned_masks(monkeypatch):
    """CUDA's memory-efficient attention reads its mask 16 bytes at a time: a view that starts
    within another's memory is a misaligned address (seen on an H100)."""

    def attention(*args, attn_mask=None, **kwargs):
        assert attn_mask is None or attn_mask.storage_offset() == 0
        return F.scaled_dot_product_attention(*args, attn_mask=attn_mask, **kwargs)

    functional = types.SimpleNamespace(**{**vars(F), "scaled_dot_product_attention": attention})
    monkeypatch.setattr(llama_step, "F", functional)


# 64 steps pay for transposed weights, 4 do not.
@crossed(2, padded=[False, True], steps=[4, 64], case=[*CASES])
def test_logits_are_the_models(case, steps, padded):
    family, settings = CASES[case]
    model = tiny_model(family, **settings)
    assert is_llama_shaped(model)
    torch.manual_seed(0)
    ids = torch.randint(3, VOCAB, (3, 10))
    prompt_len = 6
    mask = torch.arange(10) >= torch.tensor([[0], [2], [5]]) * padded
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        arguments = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        plain, exact = (m(**arguments).logits for m in (model, copy.deepcopy(model).double()))
        cache = SharedPromptCache(len(model.model.layers), capacity=10)
        model(
            input_ids=ids[:, :prompt_len],
            attention_mask=mask[:, :prompt_len],
            position_ids=positions[:, :prompt_len],
            past_key_values=cache,
        )
        step = LlamaStep(model, steps)
        for t in range(prompt_len, 10):
            seen = mask[:, : t + 1] if padded else None
            logits = step(ids[:, t], positions[:, t], [(cache, seen)])
            assert_as_near(logits, plain[:, t], exact[:, t])


def adapted(model, **lora):
    """With adapters whose B is not 0."""
    add_adapters(model, {"r": 2, **lora})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


@crossed(
    2,
    dtypes=[  # of the model, of its adapters
        (torch.float32, torch.float32), (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
    steps=[4, 64],
    targets=["all-linear", ["q_proj", "v_proj", "down_proj", "lm_head"]],
    is_off=[False, True],
)  # fmt: skip
def test_logits_of_a_model_with_adapters_are_the_models(targets, steps, dtypes, is_off):
    model = tiny_model("llama", num_attention_heads=4, num_key_value_heads=2)
    cast_parameters_(model, dtypes[0])
    adapted(model, target_modules=targets, use_rslora=True)
    if dtypes[1] is not torch.float32:
        cast_parameters_(model, dtypes[1])
    assert is_llama_shaped(model)
    torch.manual_seed(0)
    ids = torch.randint(3, VOCAB, (3, 8))
    with torch.no_grad(), adapters_off(model) if is_off else contextlib.nullcontext():
        exact, plain = (m(input_ids=ids).logits for m in (copy.deepcopy(model).double(), model))
        cache = SharedPromptCache(len(model.model.layers), capacity=8)
        model(input_ids=ids[:, :6], past_key_values=cache)
        step = LlamaStep(model, steps)
        for t in (6, 7):
            logits = step(ids[:, t], torch.full((3,), t), [(cache, None)])
            assert_as_near(logits, plain[:, t], exact[:, t])


def test_other_adapters_are_left_to_the_model():
    for settings in ({"dropout": 0.1}, {"target_modules": ["embed_tokens"]}):
        assert not is_llama_shaped(adapted(tiny_model("llama"), **settings))
    for settings in ({"use_dora": True}, {"lora_bias": True}):
        model = tiny_model("llama", attention_bias=True)
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"], **settings), model)
        assert not is_llama_shaped(model)
    replaced = adapted(tiny_model("llama"))
    replaced.model.layers[1].mlp.up_proj.forward = lambda hidden: hidden
    assert not is_llama_shaped(replaced)
    hooked = adapted(tiny_model("llama"))
    hooked.model.layers[1].mlp.up_proj.register_full_backward_hook(lambda *_: None)
    assert not is_llama_shaped(hooked)
    merged = adapted(tiny_model("llama"))
    merged.model.layers[0].mlp.up_proj.merge()
    assert not is_llama_shaped(merged)
    two = adapted(tiny_model("llama"))
    with pytest.warns(UserWarning, match="multiple adapters"):
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), two, "other")
    assert not is_llama_shaped(two)


@pytest.mark.parametrize("case", ["biases everywhere", "normed queries, wide heads"])
def test_in_bfloat16_it_is_as_near_to_float32_as_the_model(case):
    family, settings = CASES[case]
    exact = tiny_model(family, **settings)
    with torch.no_grad():
        for parameter in exact.parameters():  # the same weights in both
            parameter.copy_(parameter.bfloat16())
    half = copy.deepcopy(exact)
    cast_parameters_(half, torch.bfloat16)
    torch.manual_seed(0)
    ids = torch.randint(3, VOCAB, (3, 8))
    with torch.no_grad():
        truth, own = (model(input_ids=ids).logits[:, -1].float() for model in (exact, half))
        cache = SharedPromptCache(len(half.model.layers), capacity=8)
        half(input_ids=ids[:, :7], past_key_values=cache)
        step = LlamaStep(half, 64)
        found = step(ids[:, 7], torch.full((3,), 7), [(cache, None)]).float()
    assert float((found - truth).norm()) < 1.5 * float((own - truth).norm())


@pytest.mark.parametrize("family", ["gpt2", "gemma2 (soft-cap)", "granite (logits scaling)"])
def test_other_models_are_not_taken_for_llama(family):
    assert not is_llama_shaped(tiny_model(family))


def test_changed_modules_are_left_to_the_model():
    class Other(nn.Linear):
        pass

    class Derived(LlamaForCausalLM):
        pass

    assert not is_llama_shaped(Derived(tiny_model("llama").config))
    other = tiny_model("llama")
    other.model.layers[1].mlp.up_proj = Other(32, 64)
    assert not is_llama_shaped(other)
    hooked = tiny_model("llama")
    hooked.model.norm.register_forward_hook(lambda *_: None)
    assert not is_llama_shaped(hooked)
    shortened = tiny_model("llama")
    shortened.config.num_hidden_layers = 1  # of two: the model leaves the other one out
    assert not is_llama_shaped(shortened)
    replaced = tiny_model("llama")
    replaced.model.norm.forward = lambda hidden: hidden
    assert not is_llama_shaped(replaced)
