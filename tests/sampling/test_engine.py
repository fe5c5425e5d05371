"""Completions equal those of transformers when greedy, and follow the distribution when sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rllib_llm.sampling.engine import Completions, generate
from rllib_llm.sampling.noise import uniform_noise
from rllib_llm.sampling.params import SamplingParams
from tests.modules.tiny_models import FAMILIES, VOCAB, tiny_model

PAD = 0
STOPS = tuple(range(2, 10))  # about a tenth of the vocabulary: rows end at different lengths
MODELS = {name: (name, {}) for name in FAMILIES} | {
    # A head of its own, since a tied one makes these models repeat a single token.
    "bloom (alibi)": ("bloom (alibi)", {"tie_word_embeddings": False}),
    "gemma2 (soft-cap)": ("gemma2 (soft-cap)", {"tie_word_embeddings": False}),
    # Windows shorter than prompt + completion, in some layers and in all.
    "gemma2 (window)": (
        "gemma2 (soft-cap)",
        {"tie_word_embeddings": False, "sliding_window": 6},
    ),
    "qwen2 (window)": (
        "qwen2 (tied)",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "llama (eager)": ("llama", {"attn_implementation": "eager"}),
}


def ragged_prompts(extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Five prompts of 9, 3, 5, 1 and 7 tokens, left-padded, `extra` columns more than needed."""
    torch.manual_seed(5)
    lengths = torch.tensor([9, 3, 5, 1, 7])
    mask = torch.arange(9 + extra) >= 9 + extra - lengths[:, None]
    ids = torch.randint(3, VOCAB, (5, 9)).masked_fill(~mask[:, extra:], PAD)
    return torch.cat([torch.full((5, extra), PAD), ids], dim=1), mask


def sampled(model, ids, mask, n=1, seed=1, looks=None, **settings) -> Completions:
    params = SamplingParams(pad_token_id=PAD, **{"max_new_tokens": 30, **settings})
    noise = uniform_noise(seed, range(len(ids) * n), params.max_new_tokens)
    return generate(
        model, ids, mask, params, num_completions=n, noise=noise, steps_between_looks=looks
    )


def greedy(model, ids, mask, n=1, looks=None, **settings) -> Completions:
    params = SamplingParams(
        pad_token_id=PAD, greedy=True, **{"max_new_tokens": 30, "stop_token_ids": STOPS} | settings
    )
    return generate(model, ids, mask, params, num_completions=n, steps_between_looks=looks)


def greedy_of_transformers(model, ids, mask, n=1, max_new_tokens=30, stops=STOPS, **settings):
    return model.generate(
        input_ids=ids.repeat_interleave(n, dim=0),
        attention_mask=mask.long().repeat_interleave(n, dim=0),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stops) or None,
        pad_token_id=PAD,
        **settings,
    )[:, ids.shape[1] :]


def full_logits(model, ids, mask, out: Completions, n: int) -> torch.Tensor:
    """Logits [batch, T, vocab] that predict each completion token, from one pass without cache."""
    all_ids = torch.cat([ids.repeat_interleave(n, dim=0), out.completion_ids], dim=1)
    all_mask = torch.cat([mask.repeat_interleave(n, dim=0), out.completion_mask], dim=1)
    with torch.no_grad():
        logits = model(
            input_ids=all_ids,
            attention_mask=all_mask.long(),
            position_ids=(all_mask.long().cumsum(dim=1) - 1).clamp(min=0),
            use_cache=False,
        ).logits
    return logits[:, ids.shape[1] - 1 : -1]


# --- greedy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_transformers_token_for_token(name):
    family, settings = MODELS[name]
    model = tiny_model(family, **settings)
    ids, mask = ragged_prompts()

    out = greedy(model, ids, mask, n=2)

    assert torch.equal(out.completion_ids, greedy_of_transformers(model, ids, mask, n=2))
    assert len(out.completion_mask.sum(dim=1).unique()) > 1, "the case should have mixed lengths"


def seeded(architecture: str, **settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, pad_token_id=PAD, **settings)
    return AutoModelForCausalLM.from_config(config).eval()


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


# --- sampling --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7}, {"top_k": 6, "top_p": 0.8}],
)
def test_pairs_of_tokens_follow_the_exact_distribution(settings):
    model = seeded("llama", vocab_size=12, initializer_range=0.3, **FAMILIES["llama"])
    ids, mask = torch.tensor([[3, 5, 7]]), torch.ones(1, 3, dtype=torch.bool)
    draws = 20_000

    out = sampled(model, ids, mask, n=draws, max_new_tokens=2, **settings)

    first = exact_probabilities(model, ids, **settings)
    after = torch.cat([ids.expand(12, -1), torch.arange(12)[:, None]], dim=1)
    expected = (first.T * exact_probabilities(model, after, **settings)).flatten() * draws
    pairs = out.completion_ids[:, 0] * 12 + out.completion_ids[:, 1]
    counts = torch.bincount(pairs, minlength=144).double()
    assert counts[expected == 0].sum() == 0, "tokens outside the truncated set were drawn"
    # Pearson's chi-square needs about 5 expected per cell: rarer pairs are pooled.
    common = expected >= 5
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]]).clamp(min=1e-9)
    degrees = int(common.sum())
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1.0)).sum().item()
    # Mean k and variance 2k: four standard deviations are passed once in ten thousand runs or less.
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)


def exact_probabilities(model, ids, temperature=1.0, top_k=0, top_p=1.0) -> torch.Tensor:
    """[batch, vocab] float64 probabilities of the next token, truncated by plain loops."""
    with torch.no_grad():
        rows = (model(ids).logits[:, -1].double() / temperature).softmax(dim=-1)
    truncated = torch.zeros_like(rows)
    for row, kept in zip(rows, truncated, strict=True):
        order = row.argsort(descending=True)[: top_k or None]
        mass, wanted = 0.0, top_p * float(row[order].sum())
        for token in order:
            if mass < wanted:
                kept[token] = row[token]
            mass += float(row[token])
    return truncated / truncated.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral (sliding window)"])
def test_a_rows_tokens_do_not_depend_on_its_batch(family):
    model = tiny_model(family)
    ids, mask = ragged_prompts()
    together = sampled(model, ids, mask, n=3, stop_token_ids=STOPS)
    noise = uniform_noise(1, range(15), 30)
    params = SamplingParams(pad_token_id=PAD, max_new_tokens=30, stop_token_ids=STOPS)

    # Every group alone, without the columns that only longer prompts need; rows in another order.
    for group in range(5):
        own = mask[group].nonzero()[0].item()
        rows = torch.tensor([2, 0, 1]) + 3 * group
        alone = generate(
            model,
            ids[group : group + 1, own:],
            mask[group : group + 1, own:],
            params,
            num_completions=3,
            noise=noise[rows],
        )
        length = alone.completion_ids.shape[1]
        assert torch.equal(alone.completion_ids, together.completion_ids[rows, :length])
        assert not together.completion_mask[rows, length:].any()
        torch.testing.assert_close(
            alone.logprobs, together.logprobs[rows, :length], atol=2e-5, rtol=0
        )


@pytest.mark.parametrize("looks", [2, 7, 100])
def test_when_ended_rows_leave_does_not_change_the_completions(looks):
    model = tiny_model("llama")
    ids, mask = ragged_prompts()

    expected = sampled(model, ids, mask, n=3, stop_token_ids=STOPS)
    out = sampled(model, ids, mask, n=3, stop_token_ids=STOPS, looks=looks)

    assert torch.equal(out.completion_ids, expected.completion_ids)
    assert torch.equal(out.completion_mask, expected.completion_mask)
    assert torch.equal(out.finished, expected.finished)
    torch.testing.assert_close(out.logprobs, expected.logprobs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("max_rows", [1, 3, 7, 12])
def test_how_many_rows_are_decoded_at_once_does_not_change_the_completions(max_rows):
    model = tiny_model("llama")
    ids, mask = ragged_prompts()
    params = SamplingParams(pad_token_id=PAD, max_new_tokens=30, stop_token_ids=STOPS)
    noise = uniform_noise(1, range(15), 30)

    expected = generate(model, ids, mask, params, num_completions=3, noise=noise)
    out = generate(model, ids, mask, params, num_completions=3, noise=noise, max_rows=max_rows)

    assert torch.equal(out.completion_ids, expected.completion_ids)
    assert torch.equal(out.completion_mask, expected.completion_mask)
    assert torch.equal(out.finished, expected.finished)
    torch.testing.assert_close(out.logprobs, expected.logprobs, atol=2e-5, rtol=0)


def test_padding_in_front_of_all_prompts_changes_nothing():
    model = tiny_model("llama")

    expected = sampled(model, *ragged_prompts(), stop_token_ids=STOPS)
    out = sampled(model, *ragged_prompts(extra=4), stop_token_ids=STOPS)

    assert torch.equal(out.completion_ids, expected.completion_ids)


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.7}, {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_new_tokens": 6}],
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral (sliding window)", "gemma2 (window)"])
def test_logprobs_are_those_of_a_full_forward_before_truncation(name, settings):
    family, changes = MODELS[name]
    model = tiny_model(family, **changes)
    ids, mask = ragged_prompts()

    out = sampled(model, ids, mask, n=2, stop_token_ids=STOPS, **settings)

    logits = full_logits(model, ids, mask, out, n=2) / settings["temperature"]
    expected = logits.log_softmax(dim=-1).gather(-1, out.completion_ids[..., None]).squeeze(-1)
    expected = expected.where(out.completion_mask, 0.0)
    torch.testing.assert_close(out.logprobs, expected, atol=1e-5, rtol=0)


def test_greedy_logprobs_know_the_temperature_too():
    model = tiny_model("llama")
    ids, mask = ragged_prompts()

    out = greedy(model, ids, mask, temperature=2.0)

    logits = full_logits(model, ids, mask, out, n=1) / 2.0
    expected = logits.log_softmax(dim=-1).gather(-1, out.completion_ids[..., None]).squeeze(-1)
    torch.testing.assert_close(
        out.logprobs, expected.where(out.completion_mask, 0.0), atol=1e-5, rtol=0
    )


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
    assert [t.dtype for t in vars(out).values()] == [
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
    with pytest.raises(ValueError, match="max_new_tokens=56 must be at most 55"):
        greedy(model, *ragged_prompts(), max_new_tokens=56)


def test_inputs_that_do_not_fit_are_named():
    model = tiny_model("llama")
    ids, mask = ragged_prompts()
    params = SamplingParams(pad_token_id=PAD, max_new_tokens=4)
    noise = torch.rand(5, 4)
    cases = [
        ("prompt_ids=", {"prompt_ids": ids[:, 1:]}),
        ("prompt_mask=torch.int64 must be torch.bool", {"prompt_mask": mask.long()}),
        ("left-padded", {"prompt_mask": mask.flip(dims=[1])}),
        ("left-padded", {"prompt_mask": mask & (torch.arange(9) != 7)}),
        ("left-padded", {"prompt_mask": mask & (torch.arange(5)[:, None] != 2)}),
        ("num_completions=0", {"num_completions": 0}),
        ("noise=None must be", {"noise": None}),
        (r"noise=\(5, 3\) must be \[5, >= 4\]", {"noise": noise[:, :3]}),
        (r"must be \[10, >= 4\]", {"num_completions": 2}),
        ("steps_between_looks=0 must be at least 1", {"steps_between_looks": 0}),
        ("max_rows=0 must be at least 1", {"max_rows": 0}),
    ]
    for message, change in cases:
        arguments = {"prompt_ids": ids, "prompt_mask": mask, "params": params, "noise": noise}
        with pytest.raises(ValueError, match=message):
            generate(model, **{**arguments, **change})


def test_a_model_in_training_mode_is_refused():
    model = tiny_model("llama").train()

    with pytest.raises(ValueError, match="model.training=True must be False"):
        greedy(model, *ragged_prompts())
