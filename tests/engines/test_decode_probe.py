"""Models that are not decoded as they compute are told from those that are."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.engines.decode_step import DecodePlan
from rllib_llm.engines.engine import check_decoding
from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.shared.errors import Problems, SettingWarning
from tests.engines.tiny_generations import (
    MODELS,
    greedy,
    greedy_of_transformers,
    ragged_prompts,
    seeded,
)
from tests.modules import test_architectures as architectures
from tests.modules.tiny_models import VOCAB, tiny_model

_ATTENTION = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
STATEFUL = {
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "mamba2": {
        "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 16,
        "n_groups": 1, "chunk_size": 8,
    },
    "falcon_mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "recurrent_gemma": {
        **_ATTENTION, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 64,
        "head_dim": 16,
    },
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
}  # fmt: skip


def spread_out(model):
    """Random weights as large as trained ones' effects."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 3 + 0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", STATEFUL)
def test_recurrent_models_are_refused(name):
    model = spread_out(seeded(name, vocab_size=VOCAB, **STATEFUL[name]))
    with pytest.raises(ValueError, match="must give the same logits with a cache"):
        check_decoding(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_attention_layers_pass(name, dtype):
    family, settings = MODELS[name]
    check_decoding(tiny_model(family, **settings).to(dtype))


def test_layers_whose_state_the_cache_keeps_pass():
    model = seeded(
        "lfm2", vocab_size=VOCAB, **_ATTENTION, num_hidden_layers=3, initializer_range=0.2,
        layer_types=["conv", "full_attention", "conv"],
    )  # fmt: skip
    check_decoding(model)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"])
def test_values_narrower_than_keys_are_cached(name):
    model = architectures.spread_out(name)
    ids, mask = ragged_prompts()
    settings = {"n": 2, "max_new_tokens": 8, "stops": ()}
    expected = greedy_of_transformers(model, ids, mask, **settings)
    settings["stop_token_ids"] = settings.pop("stops")
    assert greedy(model, ids, mask, **settings).completion_ids.tolist() == expected.tolist()


# Padding shifts BlenderbotSmall's positions by so little that a bound for bfloat16 lets it pass.
@pytest.mark.parametrize("name", ["blenderbot-small", "openai-gpt", "cpmant", "minimax"])
def test_models_that_decode_wrongly_or_raise_are_refused_by_name(name):
    model = architectures.spread_out(name)
    with pytest.raises(Problems) as error:
        check_decoding(model)
    assert [(each.name, each.value) for each in error.value.found] == [
        ("model", type(model).__name__)
    ]


def test_attention_to_chosen_tokens_is_warned_of_where_roundings_choose():
    check_decoding(architectures.spread_out("deepseek_v32"))
    with pytest.warns(SettingWarning, match="indexed_attention"):
        check_decoding(architectures.spread_out("deepseek_v32", torch.bfloat16))


def test_a_model_is_tried_at_its_first_generation_and_once():
    model = tiny_model("llama")
    calls = []
    model.register_forward_pre_hook(lambda *args: calls.append(1))
    ids, mask = ragged_prompts()
    greedy(model, ids, mask, max_new_tokens=1)
    first, calls[:] = len(calls), []
    greedy(model, ids, mask, max_new_tokens=1)
    assert first > len(calls) == 1  # the prefill
    refused = spread_out(seeded("mamba", vocab_size=VOCAB, **STATEFUL["mamba"]))
    for start in (
        lambda: greedy(refused, ids, mask, max_new_tokens=1),
        lambda: TorchEngine(refused, version=0),
    ):
        with pytest.raises(ValueError, match="must give the same logits with a cache"):
            start()


def test_how_a_model_is_decoded_is_decided_from_its_layers_and_dtype():
    model = tiny_model("llama")
    plan = DecodePlan.of(model)
    assert plan.is_llama and plan.is_recordable and plan.num_layers == len(model.model.layers)
    # Twice as many bytes of a row position: a block has to save half as many of them.
    assert DecodePlan.of(model.double()).block_cost == plan.block_cost / 2
    other = DecodePlan.of(tiny_model("gpt2"))
    assert other.shares_prompts and not other.is_llama and other.block_cost == float("inf")
