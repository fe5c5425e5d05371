"""nf4 on every processor: bitsandbytes may not repack weights where it finds AVX512-BF16.

Each test runs as on a processor that has it and as on one that has not, whatever this one has.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from transformers import BitsAndBytesConfig

from rllib_llm.envs.frozen_models import FrozenReference, RewardModelScorer
from rllib_llm.modules.frozen import load_quantized
from rllib_llm.modules.lora import AdapterBase, add_adapters, is_adapter, merge_into, save_adapters
from rllib_llm.modules.pretrained import load_causal_lm, load_sequence_classifier
from rllib_llm.modules.quantization import model_bytes
from rllib_llm.modules.tokenizer import load_tokenizer
from tests import tiny_models as tiny

IDS = torch.randint(4, 260, (3, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS, dtype=torch.bool)
ROWS = (IDS[:, :4], MASK[:, :4], IDS[:, 4:], MASK[:, 4:])


@pytest.fixture(params=[True, False], ids=["AVX512-BF16", "no AVX512-BF16"], autouse=True)
def processor(request, monkeypatch):
    """bitsandbytes' layers ask this when they are made."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: request.param)


@pytest.fixture
def folder(tmp_path):
    return tiny.save(tmp_path / "lm", tiny.llama(attention_dropout=0.0), tiny.byte_tokenizer())


def quantised(folder):
    return load_quantized(load_causal_lm, folder, quantization="nf4")


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def four_bit_layers(model) -> list[Linear4bit]:
    return [layer for layer in model.modules() if isinstance(layer, Linear4bit)]


def test_a_forward_pass_leaves_weights_and_scales_as_they_are(folder):
    model = quantised(folder)
    size, layers = model_bytes(model), four_bit_layers(model)
    before = [layer.weight.clone() for layer in layers]
    dense = [dequantize_4bit(layer.weight.data, layer.weight.quant_state) for layer in layers]
    first = logits(model)
    assert torch.equal(logits(model), first)
    assert len(layers) == 14 and model_bytes(model) == size
    for layer, weight, values in zip(layers, before, dense, strict=True):
        assert torch.equal(layer.weight, weight) and layer.weight.quant_state.nested
        assert torch.equal(dequantize_4bit(layer.weight.data, layer.weight.quant_state), values)


def test_the_product_is_that_of_the_dequantised_weight(folder):
    layer = four_bit_layers(quantised(folder))[0]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), x @ weight.T)


def test_judge_and_reference_measure_their_drift(folder, tmp_path):
    reference = FrozenReference(folder, quantization="nf4", measure_drift=3)
    first = reference.logprobs(*ROWS)
    assert torch.equal(reference.logprobs(*ROWS), first)
    # Bounds as in test_quantization.py: three times what was measured on three seeds.
    assert 0 < reference.metrics()["drift/kl"] < 8e-2
    judge = tiny.save(tmp_path / "judge", tiny.llama_classifier(), tiny.byte_tokenizer())
    scorer = RewardModelScorer(
        judge, tokenizer=load_tokenizer(folder), quantization="nf4", measure_drift=3
    )
    exact = load_sequence_classifier(judge)
    with torch.no_grad():
        largest = (scorer(*ROWS) - exact(IDS).logits[:, 0]).abs().max()
    assert scorer.metrics()["drift/max_abs"] == pytest.approx(largest.item(), abs=2e-5)


def test_adapters_learn_in_eval_mode_after_forward_passes_without_gradient(folder):
    """As a policy that has sampled is trained: its trunk has no dropout and stays in eval mode."""
    model = quantised(folder)
    logits(model)
    add_adapters(model, {"r": 4})
    twin = load_causal_lm(folder)
    for name, layer in twin.named_modules():
        if name.endswith("_proj"):
            weight = model.get_submodule(f"{name}.base_layer").weight
            layer.weight.data = dequantize_4bit(weight.data, weight.quant_state)
    add_adapters(twin, {"r": 4})
    for each in (model, twin):
        logits(each)
        each(IDS).logits.square().mean().backward()
    dense = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            assert parameter.grad.abs().max() > 0
            torch.testing.assert_close(parameter.grad, dense[name].grad, rtol=1e-3, atol=1e-6)


def test_merge_and_checkpoint_after_forward_passes(folder, tmp_path):
    model, source = quantised(folder), AdapterBase(folder, "nf4")
    add_adapters(model, {"r": 4})
    tensors = {name: tensor for name, tensor in model.named_parameters() if is_adapter(name)}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if ".lora_B." in name:
                tensor.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
    on = logits(model)
    plain = load_causal_lm(folder)
    merge_into(plain, model, tensors)
    torch.testing.assert_close(logits(plain), on, rtol=1e-4, atol=1e-4)
    save_adapters(model, tensors, tmp_path / "adapters", source)
    torch.testing.assert_close(logits(load_causal_lm(tmp_path / "adapters")), logits(plain))
    # What a state holds is exact, however often the model has run, and so are copies.
    kept = io.BytesIO()
    torch.save(model.state_dict(), kept)
    kept.seek(0)
    for name, tensor in torch.load(kept, weights_only=False).items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert torch.equal(logits(copy.deepcopy(model)), on)


def test_a_model_saved_in_four_bits_is_not_repacked_either(folder, tmp_path):
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    path = tiny.save(
        tmp_path / "saved",
        load_causal_lm(folder, quantization_config=four_bits),
        load_tokenizer(folder),
    )
    model = load_causal_lm(path)
    layers = four_bit_layers(model)
    before = [layer.weight.clone() for layer in layers]
    logits(model)
    assert len(layers) == 14
    assert all(torch.equal(b, layer.weight) for b, layer in zip(before, layers, strict=True))
