"""Layers with hand-written gradients: against finite differences and transformers' own modules."""

from __future__ import annotations

import copy

import pytest
import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from rllib_llm.modules.llama_trunk import (
    embedded,
    fused_hidden,
    gated_mlp,
    is_fusible,
    normed_linears,
    rms_norm,
    rotate,
)
from rllib_llm.modules.lora import add_adapters
from rllib_llm.modules.packing import completion_rows
from rllib_llm.modules.trunk import trunk_hidden, wanted_hidden, wanted_tokens
from tests.modules.tiny_models import VOCAB, tiny_model

EPS = 1e-5


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_gradients_are_those_of_finite_differences():
    inputs, norm, cos, sin = randn(5, 4), randn(4), randn(5, 1, 2), randn(5, 1, 2)
    cos, sin = cos.detach().repeat(1, 1, 2), sin.detach().repeat(1, 1, 2)
    check = torch.autograd.gradcheck
    assert check(lambda *a: rms_norm(*a, EPS), (randn(3, 2, 4), norm))
    assert check(lambda heads: rotate(heads, cos, sin), (randn(5, 3, 4),))
    assert check(
        lambda x, n, a, b, bias: normed_linears(x, n, EPS, (a, b), (bias, None)),
        (inputs, norm, randn(3, 4), randn(2, 4), randn(3)),
    )
    assert check(
        lambda x, n, *w: gated_mlp(x, n, EPS, *w),
        (inputs, norm, randn(6, 4), randn(6, 4), randn(4, 6)),
    )


@pytest.mark.parametrize("shape", [(6, 4, 8), (0, 4, 8)])
def test_a_norm_takes_a_gradient_that_lies_otherwise(shape):
    """Attention by torch's plain operations gives [heads, tokens, features], permuted."""
    inputs, weight = torch.randn(shape, requires_grad=True), torch.randn(8)
    upstream = torch.randn(shape[1], shape[0], 8).transpose(0, 1)
    (grad,) = torch.autograd.grad(rms_norm(inputs, weight, EPS), inputs, upstream)
    norm = LlamaRMSNorm(8, EPS)
    norm.weight.data = weight
    torch.testing.assert_close(grad, torch.autograd.grad(norm(inputs), inputs, upstream)[0])


def test_each_layer_is_transformers_own():
    config = tiny_model("llama").config
    inputs, norm = torch.randn(7, config.hidden_size), LlamaRMSNorm(config.hidden_size, EPS)
    torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(rms_norm(inputs, norm.weight, EPS), norm(inputs))
    mlp = LlamaMLP(config)
    weights = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    found = gated_mlp(inputs, norm.weight, EPS, *weights)
    torch.testing.assert_close(found, inputs + mlp(norm(inputs)))
    query, key = torch.randn(2, 1, 3, 7, config.head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(inputs, torch.arange(7).unsqueeze(0))
    expected = apply_rotary_pos_emb(query, key, cos, sin)
    for heads, rotated in zip((query, key), expected, strict=True):
        found = rotate(heads[0].transpose(0, 1), cos[0].unsqueeze(1), sin[0].unsqueeze(1))
        torch.testing.assert_close(found.transpose(0, 1), rotated[0])


def dense_rows(model, num_prompts: int = 4):
    prompts = torch.randint(3, VOCAB, (num_prompts, 5)).repeat_interleave(8 // num_prompts, dim=0)
    mask = torch.arange(6) < torch.randint(1, 7, (8, 1))
    completions = torch.randint(3, VOCAB, (8, 6))
    rows = completion_rows(prompts, torch.ones_like(prompts).bool(), completions, mask)
    return wanted_tokens(model.model, rows)


@pytest.mark.parametrize("num_prompts", [1, 4, 8])  # with 1 more states are wanted than read
@pytest.mark.parametrize("family", ["llama", "qwen2 (tied)", "qwen3", "mistral (sliding window)"])
def test_the_trunk_is_the_models_own(family, num_prompts):
    model = tiny_model(family, sliding_window=64)
    wanted = dense_rows(model, num_prompts)
    assert is_fusible(model.model)
    found = fused_hidden(model.model, wanted)
    expected = wanted.pick(trunk_hidden(model.model, wanted))
    # Of the largest state: in float64 both are found to be up to 7e-6 of it from the exact ones.
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected, atol=2e-5 * scale, rtol=0)
    weights = list(model.model.parameters())
    upstream = torch.randn_like(expected)
    pairs = zip(
        torch.autograd.grad(found, weights, upstream),
        torch.autograd.grad(expected, weights, upstream),
        strict=True,
    )
    for ours, own in pairs:
        torch.testing.assert_close(ours, own, atol=1e-4 * float(own.abs().max()), rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2 (tied)", "qwen3"])
def test_in_bfloat16_it_is_as_near_to_float64_as_the_models_own(family):
    model = tiny_model(family)
    with torch.no_grad():
        for parameter in model.parameters():  # the same weights in all three
            # Smaller ones than the tiny models', which multiply every rounding.
            scale = 0.3 if parameter.ndim == 2 else 1.0
            parameter.copy_((scale * parameter).bfloat16())
    wanted = dense_rows(model)  # which lays out the attention of this model
    exact, half = copy.deepcopy(model).double(), copy.deepcopy(model)
    for parameter in half.parameters():  # not the rotary embedding's frequencies
        parameter.data = parameter.data.bfloat16()
    assert is_fusible(half.model)
    upstream = torch.randn(len(wanted.targets), model.config.hidden_size).bfloat16()

    def everything(trunk, hidden):
        states = hidden(trunk, wanted)
        grads = torch.autograd.grad(states, list(trunk.parameters()), upstream.to(states.dtype))
        return torch.cat([t.detach().double().flatten() for t in (states, *grads)])

    def own(trunk, wanted):
        return wanted.pick(trunk_hidden(trunk, wanted))

    truth = everything(exact.model, own)
    ours, theirs = ((everything(half.model, f) - truth).norm() for f in (fused_hidden, own))
    assert float(ours) < 1.2 * float(theirs), (float(ours), float(theirs), float(truth.norm()))


def test_the_gradient_of_a_frequent_token_is_summed_in_float32():
    """1 + 1000 times 2^-9: in bfloat16 each sum would be rounded back to 1."""
    weight = torch.zeros(3, 1, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.full((1001, 1), 2.0**-9, dtype=torch.bfloat16)
    grad[0] = 1.0
    ids = torch.ones(1001, dtype=torch.int64)
    embedded(ids, weight, None).backward(grad)
    # 2.953125 lies between bfloat16's numbers, which are 2^-6 apart from 2 on.
    assert float(weight.grad[1]) == pytest.approx(2.953125, abs=2.0**-7)
    assert not weight.grad[0].any() and not weight.grad[2].any()


def test_the_padding_token_is_learnt_from_as_transformers_does():
    """Not at all: the row of its embedding keeps its value, also where the token is text."""
    model = tiny_model("llama")
    embedding = model.model.embed_tokens
    embedding.padding_idx = 4
    ids = torch.tensor([[3, 4, 5, 6]])
    everything = torch.ones_like(ids).bool()
    rows = completion_rows(ids, everything, ids, everything)
    hidden = wanted_hidden(model.model, wanted_tokens(model.model, rows))
    (gradient,) = torch.autograd.grad(hidden.square().sum(), [embedding.weight])
    assert not gradient[4].any() and gradient[3].any()


def test_frozen_weights_get_no_gradient():
    model = tiny_model("llama")
    last = model.model.layers[-1]
    model.requires_grad_(False)
    last.mlp.up_proj.requires_grad_(True)
    wanted = dense_rows(model)
    wanted_hidden(model.model, wanted).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == [
        "model.layers.1.mlp.up_proj.weight"
    ]


def test_what_is_not_plain_is_left_to_the_model():
    def changed(change) -> bool:
        model = tiny_model("llama")
        change(model)
        return is_fusible(model.model)

    assert changed(lambda model: None)
    assert changed(lambda model: model.to(torch.bfloat16))
    assert not changed(lambda model: model.to(torch.float16))
    assert not changed(lambda model: add_adapters(model, {"r": 2}))
    assert not changed(lambda model: model.model.layers[0].compile())
    assert not changed(lambda model: model.model.norm.register_forward_hook(lambda *_: None))
    assert not changed(lambda model: setattr(model.model.config, "hidden_act", "gelu"))
    assert not changed(lambda model: setattr(model.model.config, "num_hidden_layers", 1))
    assert not changed(lambda model: model.model.layers[1].mlp.to(torch.bfloat16))

    class ShiftedNorm(LlamaRMSNorm):  # as Gemma's: the same names, another result
        def forward(self, hidden):
            return super().forward(hidden) + hidden

    def shifted(model):
        model.model.layers[1].input_layernorm = ShiftedNorm(model.config.hidden_size)

    assert not changed(shifted)

    def int8(model):
        quantize_(model, Int8WeightOnlyConfig())

    assert not changed(int8)

    def checkpointed(model):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()

    assert not changed(checkpointed)
    assert not is_fusible(tiny_model("gpt2").transformer)


def test_dropout_in_attention_is_left_to_the_model():
    model = tiny_model("llama", attention_dropout=0.5)
    assert is_fusible(model.eval().model) and not is_fusible(model.train().model)
