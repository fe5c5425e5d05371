from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig

from rllib_llm.modules.frozen import load_quantized
from rllib_llm.modules.pretrained import load_causal_lm, load_sequence_classifier
from rllib_llm.modules.quantization import (
    head_names,
    is_quantized,
    model_bytes,
    next_token_drift,
    quantizable_layers,
    quantize,
    resolve_backend,
    score_drift,
)
from rllib_llm.modules.tokenizer import load_tokenizer
from tests import tiny_models as tiny

IDS = torch.randint(4, 260, (32, 16), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS, dtype=torch.bool)

# (largest KL, least top-1 agreement) with float32 that each way may show on the tiny Llama: three
# times the KL measured on three seeds, and the agreement of the table in quantization.py.
CHOICES = {
    ("bf16", "auto"): (1.2e-4, 0.95),
    ("int8", "torchao"): (4e-4, 0.93),
    ("int8", "bitsandbytes"): (8e-4, 0.9),
    ("nf4", "bitsandbytes"): (8e-2, 0.5),
}
FEWER_BITS = [choice for choice in CHOICES if choice[0] != "bf16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("lm"), tiny.llama(), tiny.byte_tokenizer())


def layer_kinds(model: nn.Module) -> set[bool]:
    return {is_quantized(layer) for _, layer in quantizable_layers(model, head_names(model))}


@pytest.mark.parametrize(("quantization", "backend"), CHOICES)
def test_causal_lm_is_smaller_and_stays_close(folder, quantization, backend):
    exact = load_causal_lm(folder)
    model = load_quantized(load_causal_lm, folder, quantization=quantization, backend=backend)
    drift = next_token_drift(model, exact, IDS, MASK)
    most_kl, least_top1 = CHOICES[quantization, backend]
    assert 0 < drift["kl"] < most_kl
    assert drift["top1"] > least_top1
    assert model_bytes(model) < 0.8 * model_bytes(exact)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("quantization", "backend"), FEWER_BITS)
def test_layers_are_quantised_and_the_head_is_not(folder, quantization, backend):
    model = load_quantized(load_causal_lm, folder, quantization=quantization, backend=backend)
    assert layer_kinds(model) == {True}
    assert type(model.lm_head) is nn.Linear
    assert torch.equal(model.lm_head.weight, tiny.llama().lm_head.weight)
    assert torch.equal(model.model.embed_tokens.weight, tiny.llama().model.embed_tokens.weight)


@pytest.mark.parametrize(("quantization", "backend"), FEWER_BITS)
@pytest.mark.parametrize("build", [tiny.llama_classifier, tiny.gpt2_classifier])
def test_score_head_stays_exact(tmp_path, build, quantization, backend):
    exact = build()
    path = tiny.save(tmp_path, exact, tiny.byte_tokenizer())
    model = load_quantized(
        load_sequence_classifier, path, quantization=quantization, backend=backend
    )
    assert layer_kinds(model) == {True}
    assert torch.equal(model.score.weight, exact.score.weight)
    with torch.no_grad():
        scores, exact_scores = (m(IDS, attention_mask=MASK).logits[:, 0] for m in (model, exact))
    drift = score_drift(scores, exact_scores)
    assert drift["rank_corr"] > (0.8 if quantization == "nf4" else 0.95)


@pytest.mark.parametrize(("quantization", "backend"), FEWER_BITS)
def test_encoders_are_quantised_too(tmp_path, quantization, backend):
    exact = tiny.bert_classifier()
    path = tiny.save(tmp_path, exact, tiny.byte_tokenizer(tiny.ENCODER_SPECIALS, pad="[PAD]"))
    model = load_quantized(
        load_sequence_classifier, path, quantization=quantization, backend=backend
    )
    assert layer_kinds(model) == {True}
    assert torch.equal(model.classifier.weight, exact.classifier.weight)


@pytest.mark.parametrize(("quantization", "backend"), CHOICES)
@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
def test_quantising_in_memory_equals_loading_quantised(tmp_path, build, quantization, backend):
    path = tiny.save(tmp_path, build(), tiny.byte_tokenizer())
    settings = {"quantization": quantization, "backend": backend}
    loaded = load_quantized(load_causal_lm, path, **settings)
    in_memory = quantize(build(), **settings)
    with torch.no_grad():
        assert torch.equal(in_memory(IDS).logits, loaded(IDS).logits)
    assert model_bytes(in_memory) == model_bytes(loaded)


@pytest.mark.parametrize(("quantization", "backend"), CHOICES)
def test_dotted_path_is_quantised(quantization, backend):
    model = load_quantized(
        load_causal_lm,
        "tests.tiny_models.build_llama",
        quantization=quantization,
        backend=backend,
    )
    assert model_bytes(model) < 0.8 * model_bytes(tiny.llama())


def test_none_is_the_model_itself_but_frozen(folder):
    model = load_quantized(load_causal_lm, folder)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, tiny.llama()(IDS).logits)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_model_bytes_counts_values_and_scales():
    layer = nn.Linear(64, 128, bias=False)
    assert model_bytes(layer) == 64 * 128 * 4
    # A Llama layer has q, k, v, o of 64x64 and gate, up, down of 64x128: 16384 + 24576 = 40960
    # values, 2 layers: 81920. Embedding and head 2 * 260 * 64, 5 norms of 64: 33600 values.
    # Buffers: rotary frequencies, 16 numbers held twice.
    rest = 33_600 * 4 + 2 * 16 * 4
    assert model_bytes(tiny.llama()) == 81_920 * 4 + rest
    # int8: a scale for each output row, (4 * 64 + 2 * 128 + 64) * 2 = 1152 rows.
    bnb = quantize(tiny.llama(), "int8", backend="bitsandbytes")
    assert model_bytes(bnb) == 81_920 + 1152 * 4 + rest


@pytest.mark.parametrize("width", [64, 96, 288, 50])
@pytest.mark.parametrize(("quantization", "backend"), FEWER_BITS)
def test_weights_of_any_width_stay_close(width, quantization, backend):
    # Rounding a normal weight to int8 by rows is off by about 1 %, to nf4 by blocks about 9 %.
    model = tiny.llama(hidden_size=width, num_attention_heads=1, num_key_value_heads=1)
    exact = model.model.layers[0].mlp.up_proj
    inputs = torch.randn(50, width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = exact(inputs)
        if (width, quantization) == (50, "nf4"):
            with pytest.warns(UserWarning, match="12 of 14 linear layers.* stay unquantised"):
                model = quantize(model, quantization, backend=backend)
        else:
            model = quantize(model, quantization, backend=backend)
        error = (model.model.layers[0].mlp.up_proj(inputs) - wanted).norm() / wanted.norm()
    assert error < (0.12 if quantization == "nf4" else 0.025)


def test_auto_backend_follows_the_table():
    assert resolve_backend("int8", "auto", "cpu") == "torchao"
    assert resolve_backend("int8", "auto", "cuda:0") == "bitsandbytes"
    assert resolve_backend("nf4", "auto", "cpu") == "bitsandbytes"
    assert resolve_backend("bf16", "auto", "cuda") == "none"


def test_head_names():
    assert head_names(tiny.llama()) == ["lm_head"]
    assert head_names(tiny.llama_classifier()) == ["score"]
    assert head_names(tiny.bert_classifier()) == ["classifier"]


# --- drift ---------------------------------------------------------------------------------


def test_no_drift_from_itself():
    drift = next_token_drift(tiny.llama(), tiny.llama(), IDS, MASK)
    assert drift == {"kl": 0.0, "top1": 1.0}


class FixedLogits(nn.Module):
    """Two tokens with the same logits everywhere."""

    device = torch.device("cpu")

    def __init__(self, *logits: float):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, input_ids, attention_mask, use_cache):
        return type("Output", (), {"logits": self.logits.expand(*input_ids.shape, 2)})


def test_kl_and_agreement_by_hand():
    # exact (1/2, 1/2) against (1/4, 3/4): KL = 1/2 ln 2 + 1/2 ln(2/3) = 0.143841.
    exact, model = FixedLogits(0.0, 0.0), FixedLogits(0.0, torch.tensor(3.0).log().item())
    mask = torch.tensor([[True, False, False]])
    drift = next_token_drift(model, exact, torch.zeros(1, 3, dtype=torch.int64), mask)
    assert drift["kl"] == pytest.approx(0.143841, abs=1e-6)
    assert drift["top1"] == 0.0  # of equal logits the first counts, and the model takes the second


def test_rank_correlation_by_hand():
    # Ranks 1 2 3 4 against 2 1 3 4: 1 - 6 * (1 + 1) / (4 * 15) = 0.8.
    x, y = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, 0.1, 7.0, 90.0])
    # With a tie the ranks are 1.5 1.5 3; Pearson's correlation with 1 2 3 is 1.5 / sqrt(1.5 * 2).
    tied = score_drift(torch.tensor([1.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]))
    assert tied["rank_corr"] == pytest.approx(1.5 / 3**0.5)
    assert score_drift(x, y) == {"rank_corr": pytest.approx(0.8), "max_abs": 86.0}
    assert math.isnan(score_drift(torch.ones(3), x[:3])["rank_corr"])


# --- bad input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantization", "backend", "message"),
    [
        ("int4", "auto", "quantization='int4' must be one of none, bf16, int8, nf4"),
        ("int8", "gptq", "backend='gptq' must be one of auto, bitsandbytes, torchao"),
        ("nf4", "torchao", "backend='torchao' must be one of auto, bitsandbytes"),
    ],
)
def test_combinations_that_do_not_exist(folder, quantization, backend, message):
    with pytest.raises(ValueError, match=message):
        load_quantized(load_causal_lm, folder, quantization=quantization, backend=backend)


def test_backend_without_effect_warns():
    with pytest.warns(UserWarning, match="backend='torchao' has no effect"):
        resolve_backend("bf16", "torchao", "cpu")


def test_model_without_linear_layers_outside_its_head():
    with pytest.raises(ValueError, match="none of its 0 linear layers"):
        quantize(tiny.llama(num_hidden_layers=0), "int8", backend="torchao")


@pytest.mark.parametrize("backend", ["torchao", "bitsandbytes"])
def test_model_saved_quantised_loads_as_it_is_and_no_other_way(folder, tmp_path, backend):
    eight_bits = BitsAndBytesConfig(load_in_8bit=True)
    quantised = load_causal_lm(folder, quantization_config=eight_bits)
    path = tiny.save(tmp_path, quantised, load_tokenizer(folder))
    assert layer_kinds(load_quantized(load_causal_lm, path)) == {True}
    with pytest.raises(ValueError, match="was saved quantised already"):
        load_quantized(load_causal_lm, path, quantization="int8", backend=backend)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("quantization", "backend"), [*CHOICES, ("int8", "auto")])
def test_on_cuda(folder, quantization, backend):
    exact = load_causal_lm(folder, device="cuda")
    model = load_quantized(
        load_causal_lm, folder, quantization=quantization, backend=backend, device="cuda"
    )
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    drift = next_token_drift(model, exact, IDS.cuda(), MASK.cuda())
    most_kl, least_top1 = CHOICES.get((quantization, backend), CHOICES["int8", "bitsandbytes"])
    assert 0 < drift["kl"] < most_kl
    assert drift["top1"] > least_top1
