"""Greedy completions equal those of transformers; masks and ends of all; what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rllib_llm.shared.errors import Problems
from tests.engines.tiny_generations import (
    MODELS,
    PAD,
    STOPS,
    greedy,
    greedy_of_transformers,
    ragged_prompts,
    sampled,
    seeded,
)
from tests.modules.tiny_models import VOCAB, tiny_model

# --- greedy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_transformers_token_for_token(name):
    family, settings = MODELS[name]
    model = tiny_model(family, **settings)
    ids, mask = ragged_prompts()

    out = greedy(model, ids, mask, n=2)

    assert torch.equal(out.completion_ids, greedy_of_transformers(model, ids, mask, n=2))
    assert len(out.completion_mask.sum(dim=1).unique()) > 1, "the case should have mixed lengths"


def test_greedy_equals_transformers_with_windows_of_gemma3():
    model = seeded(
        "gemma3_text", vocab_size=VOCAB, hidden_size=32, intermediate_size=64, head_dim=16,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        initializer_range=0.4, tie_word_embeddings=False,
    )  # fmt: skip
    ids, mask = ragged_prompts()

    out = greedy(model, ids, mask, n=2)

    assert torch.equal(out.completion_ids, greedy_of_transformers(model, ids, mask, n=2))


def test_greedy_equals_transformers_where_layers_keep_a_state():
    # Convolutions beside attention: the cache of transformers, prompts repeated.
    model = seeded(
        "lfm2", vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.2,
        layer_types=["conv", "full_attention", "conv"],
    )  # fmt: skip
    ids, mask = ragged_prompts()

    out = greedy(model, ids, mask, n=2)

    assert torch.equal(out.completion_ids, greedy_of_transformers(model, ids, mask, n=2))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_without_padding_and_without_stops(family):
    model = tiny_model(family)
    ids, _ = ragged_prompts()
    mask = torch.ones_like(ids, dtype=torch.bool)

    out = greedy(model, ids, mask, stop_token_ids=())

    assert torch.equal(out.completion_ids, greedy_of_transformers(model, ids, mask, stops=()))
    assert out.completion_mask.all()
    assert not out.finished.any()


def test_min_new_tokens_equals_transformers():
    model = tiny_model("llama")
    ids, mask = ragged_prompts()

    out = greedy(model, ids, mask, min_new_tokens=12)

    expected = greedy_of_transformers(model, ids, mask, min_new_tokens=12)
    assert torch.equal(out.completion_ids, expected)
    assert not torch.isin(out.completion_ids[:, :12], torch.tensor(STOPS)).any()
    assert int(out.completion_mask.sum(dim=1).min()) >= 13  # the stop token comes after 12 others


# --- shapes and ends ---------------------------------------------------------------------------


def test_masks_pads_and_ends_fit_each_other():
    model = tiny_model("llama")
    ids, mask = ragged_prompts()

    out = sampled(model, ids, mask, n=4, stop_token_ids=STOPS)

    lengths = out.completion_mask.sum(dim=1)
    assert out.completion_ids.shape == (20, int(lengths.max()))
    assert torch.equal(out.completion_mask, torch.arange(lengths.max()) < lengths[:, None])
    assert (out.completion_ids[~out.completion_mask] == PAD).all()
    assert (out.logprobs[~out.completion_mask] == 0).all()
    assert (out.logprobs[out.completion_mask] < 0).all()
    is_stop = torch.isin(out.completion_ids, torch.tensor(STOPS)) & out.completion_mask
    # A stop token ends its row, belongs to it, and stands nowhere else.
    assert torch.equal(is_stop.any(dim=1), out.finished)
    assert torch.equal(is_stop.float().argmax(dim=1)[out.finished], lengths[out.finished] - 1)
    assert (lengths[~out.finished] == 30).all()
    assert out.finished.any()
    assert not out.finished.all()
    assert [t.dtype for t in out.columns().values()] == [
        torch.int64, torch.bool, torch.float32, torch.bool,
    ]  # fmt: skip


@pytest.mark.parametrize("looks", [None, 8])
def test_all_rows_ending_at_once_end_the_generation(looks):
    model = tiny_model("llama")
    ids, mask = ragged_prompts()

    out = sampled(model, ids, mask, n=2, stop_token_ids=range(VOCAB), looks=looks)

    assert out.completion_ids.shape == (10, 1)
    assert out.finished.all()


def test_one_new_token():
    model = tiny_model("gpt2")
    ids, mask = ragged_prompts()

    out = greedy(model, ids, mask, max_new_tokens=1)

    expected = greedy_of_transformers(model, ids, mask, max_new_tokens=1)
    assert torch.equal(out.completion_ids, expected)
    assert out.completion_mask.all()


def test_a_pad_token_that_is_sampled_counts():
    # The model may say the pad id in the middle of a text: only the mask tells padding apart.
    model = tiny_model("llama")
    model.lm_head.bias = nn.Parameter(torch.zeros(VOCAB))
    model.lm_head.bias.data[PAD] = 1e4
    ids, mask = ragged_prompts()

    out = greedy(model, ids, mask, max_new_tokens=4)

    assert (out.completion_ids == PAD).all()
    assert out.completion_mask.all()


def test_the_model_may_be_in_half_precision():
    model = tiny_model("llama").bfloat16()
    ids, mask = ragged_prompts()

    out = sampled(model, ids, mask, stop_token_ids=STOPS)

    assert out.logprobs.dtype == torch.float32
    assert out.logprobs.isfinite().all()


def test_completions_may_enter_a_loss():
    model = tiny_model("llama")
    out = sampled(model, *ragged_prompts(), max_new_tokens=4)
    scale = torch.ones((), requires_grad=True)

    (out.logprobs * scale).sum().backward()

    assert scale.grad == pytest.approx(float(out.logprobs.sum()))


def test_the_models_parameters_are_left_as_they_were():
    for family in ("llama", "gpt2"):
        model = tiny_model(family)
        before = [(parameter, parameter.clone()) for parameter in model.parameters()]

        sampled(model, *ragged_prompts())

        for (old, values), new in zip(before, model.parameters(), strict=True):
            assert new is old
            assert torch.equal(new, values)
            assert new.requires_grad


# --- errors --------------------------------------------------------------------------------------


def test_weights_that_are_not_finite_are_reported():
    model = tiny_model("llama")
    model.lm_head.weight.data.fill_(float("nan"))

    with pytest.raises(FloatingPointError, match="NaN or infinity while sampling"):
        sampled(model, *ragged_prompts(), max_new_tokens=4)


def test_more_positions_than_the_model_has():
    model = tiny_model("gpt2")  # 64 positions; the longest prompt has 9 tokens

    greedy(model, *ragged_prompts(extra=60), max_new_tokens=55, stop_token_ids=())
    for too_many in (56, 64):  # of which the latter leave no room for a prompt
        with pytest.raises(Problems) as caught:
            greedy(model, *ragged_prompts(), max_new_tokens=too_many)
        assert caught.value.problem.rule == "have at most 64"
        assert f"9 tokens with max_new_tokens={too_many}" in caught.value.problem.name


def test_rows_that_would_depend_on_longer_ones_beside_them_are_refused():
    # Beyond 20 positions of one row, longrope rotates all rows by other factors.
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 20}
    model = tiny_model("llama", rope_parameters={**rope, **factors}, max_position_embeddings=64)
    ids, mask = ragged_prompts()
    with pytest.raises(Problems, match="longrope") as caught:
        greedy(model, ids, mask, max_new_tokens=12)
    assert caught.value.problem.rule == "have at most 20"
    together = greedy(model, ids, mask, max_new_tokens=11)
    for row in range(5):
        own = int(mask[row].sum())
        alone = greedy(model, ids[row : row + 1, -own:], mask[row : row + 1, -own:],
                       max_new_tokens=11)  # fmt: skip
        length = alone.completion_ids.shape[1]
        assert torch.equal(alone.completion_ids[0], together.completion_ids[row, :length])


def test_inputs_that_do_not_fit_are_named():
    model = tiny_model("llama")
    ids, mask = ragged_prompts()
    cases = [
        ("prompt_ids", ids[:, 1:], mask),
        ("prompt_ids", ids, mask.long()),
        ("prompt_mask", ids, mask.flip(dims=[1])),
        ("prompt_mask", ids, mask & (torch.arange(9) != 7)),
        ("prompt_mask", ids, mask & (torch.arange(5)[:, None] != 2)),
    ]
    for name, prompt_ids, prompt_mask in cases:
        with pytest.raises(Problems) as caught:
            greedy(model, prompt_ids, prompt_mask, max_new_tokens=4)
        assert caught.value.problem.name == name
