"""From logits to tokens: the inverse distribution function, truncation, log-probs."""

from __future__ import annotations

import math

import pytest
import torch

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.sampling import (
    _largest_with_mass,
    adjust_logits,
    choose_tokens,
    invert_cdf,
    truncate,
)

# Probabilities 0.1, 0.2, 0.4, 0.3 of four tokens; cumulative 0.1, 0.3, 0.7, 1.0.
PROBABILITIES = torch.tensor([0.1, 0.2, 0.4, 0.3])


def params(**settings) -> SamplingParams:
    return SamplingParams(pad_token_id=0, **settings)


@pytest.mark.parametrize(
    ("noise", "token"),
    [(0.0, 0), (0.09, 0), (0.11, 1), (0.29, 1), (0.31, 2), (0.69, 2), (0.71, 3), (1 - 2**-24, 3)],
)
def test_a_token_is_where_the_cumulative_weight_passes_the_noise(noise, token):
    # Weights need not be normalised: 10 times the probabilities.
    weights = PROBABILITIES[None] * 10

    assert invert_cdf(weights, torch.tensor([noise])).item() == token


def test_a_token_without_weight_is_never_chosen():
    weights = torch.tensor([[0.0, 0.0, 1.0, 0.0, 2.0, 0.0]]).expand(3, -1)
    # Both ends of the noise, and the boundary 1/3 between the two tokens with weight.
    noise = torch.tensor([0.0, 1 - 2**-24, 1 / 3])

    assert set(invert_cdf(weights, noise).flatten().tolist()) <= {2, 4}
    assert invert_cdf(weights, noise).flatten()[:2].tolist() == [2, 4]


def test_the_largest_noise_stays_inside_a_large_vocabulary():
    torch.manual_seed(0)
    weights = torch.rand(64, 50_000)
    weights[:, 40_000:] = 0.0  # round-off must not push the draw behind the last with weight

    tokens = invert_cdf(weights, torch.full((64,), 1 - 2**-24))

    assert int(tokens.max()) < 40_000


def test_draws_follow_the_probabilities():
    # A grid of noise instead of random numbers: each token gets exactly its share, to 1/n.
    grid = (torch.arange(10_000) + 0.5) / 10_000
    logits = PROBABILITIES.log()[None].expand(10_000, -1)

    tokens, _, _ = choose_tokens(logits, grid, params())

    assert torch.bincount(tokens, minlength=4).tolist() == [1000, 2000, 4000, 3000]


def test_temperature_divides_the_logits():
    # p ** (1/0.5) = p ** 2: 0.01, 0.04, 0.16, 0.09 of 0.30.
    grid = (torch.arange(3_000) + 0.5) / 3_000
    logits = PROBABILITIES.log()[None].expand(3_000, -1)

    tokens, logprobs, _ = choose_tokens(logits, grid, params(temperature=0.5))

    assert torch.bincount(tokens, minlength=4).tolist() == [100, 400, 1600, 900]
    assert logprobs[0].item() == pytest.approx(math.log(0.01 / 0.30), abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.9])
@pytest.mark.parametrize("greedy", [True, False])
def test_logprobs_are_those_of_the_untruncated_distribution(temperature, greedy):
    torch.manual_seed(1)
    logits = torch.randn(20, 50) * 3
    chosen = params(temperature=temperature, greedy=greedy, top_k=3, top_p=0.5)

    tokens, logprobs, _ = choose_tokens(logits, torch.rand(20), chosen, torch.tensor([7]))

    expected = (logits / temperature).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=0)


def test_logits_are_left_as_they_were():
    torch.manual_seed(1)
    logits = torch.randn(4, 9)
    before = logits.clone()

    choose_tokens(logits, torch.rand(4), params(temperature=0.5, top_k=2), torch.tensor([0]))

    assert torch.equal(logits, before)


def test_half_precision_logits_give_float32_logprobs():
    torch.manual_seed(2)
    logits = torch.randn(8, 30).bfloat16()

    tokens, logprobs, _ = choose_tokens(logits, torch.rand(8), params())

    assert logprobs.dtype == torch.float32
    expected = logits.float().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=0)


def test_forbidden_tokens_are_not_chosen_and_cost_no_logprob():
    logits = PROBABILITIES.log()[None].expand(600, -1)
    grid = (torch.arange(600) + 0.5) / 600

    tokens, logprobs, _ = choose_tokens(logits, grid, params(), torch.tensor([2]))

    # Without token 2 there are 0.1, 0.2, 0.3 of 0.6 left; the log-prob still knows of it.
    assert torch.bincount(tokens, minlength=4).tolist() == [100, 200, 0, 300]
    assert logprobs[0].item() == pytest.approx(math.log(0.1), abs=1e-6)
    greedy, _, _ = choose_tokens(logits, None, params(greedy=True), torch.tensor([2]))
    assert greedy.unique().tolist() == [3]


def test_a_likely_stop_token_that_is_forbidden_hides_no_other():
    # Token 2 is 200 nats above the others, which are 1 : 3 among themselves; exp(-200) is 0 in
    # float32, so that weights relative to token 2 would leave nothing to choose from.
    logits = torch.tensor([[math.log(1.0), math.log(3.0), 200.0, -300.0]]).expand(400, -1)
    grid = (torch.arange(400) + 0.5) / 400

    tokens, logprobs, _ = choose_tokens(logits, grid, params(), torch.tensor([2]))

    assert torch.bincount(tokens, minlength=4).tolist() == [100, 300, 0, 0]
    assert logprobs[0].item() == pytest.approx(-200.0)  # of the distribution with token 2
    # Of two rows only one is forbidden it.
    tokens, _, _ = choose_tokens(
        logits[:2], grid[:2], params(), torch.tensor([2]), torch.tensor([True, False])
    )
    assert tokens.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, {0, 1, 2, 3}),
        (1, 1.0, {2}),
        (2, 1.0, {2, 3}),
        (9, 1.0, {0, 1, 2, 3}),
        # In falling order 0.4, 0.3, 0.2, 0.1: before them lie 0, 0.4, 0.7, 0.9.
        (0, 0.3, {2}),
        (0, 0.5, {2, 3}),
        (0, 0.85, {1, 2, 3}),
        (0, 0.95, {0, 1, 2, 3}),
        # Of the top two, 0.4/0.7 = 0.571 is the first.
        (2, 0.55, {2}),
        (2, 0.6, {2, 3}),
        (0, 1e-9, {2}),
    ],
)
def test_truncation_keeps_exactly_the_likeliest(top_k, top_p, kept):
    weights = truncate(PROBABILITIES[None] * 5, params(top_k=top_k, top_p=top_p))

    assert set(weights[0].nonzero().flatten().tolist()) == kept
    for token in kept:
        assert weights[0, token].item() == pytest.approx(PROBABILITIES[token].item() * 5)


def test_ties_with_the_last_of_top_k_stay():
    weights = torch.tensor([[1.0, 2.0, 1.0, 0.5]])
    assert truncate(weights, params(top_k=2)).tolist() == [[1.0, 2.0, 1.0, 0.0]]


def sorted_nucleus(row, top_p):
    """The definition: in falling order, the tokens before which less than the mass lies, and those
    that are as likely as the last of them. In float64, where round-off decides nothing."""
    ordered = row.double().sort(descending=True).values
    size = int((ordered.cumsum(0) - ordered < top_p * ordered.sum()).sum())
    return set((row >= ordered[size - 1]).nonzero().flatten().tolist())


@pytest.mark.parametrize("vocab", [3, 700, 6000])
@pytest.mark.parametrize("spread", [0.1, 8.0])
@pytest.mark.parametrize("top_p", [0.1, 0.8, 0.99])
def test_a_nucleus_is_that_of_the_definition(vocab, spread, top_p):
    # Spread 8 is settled among the likeliest, spread 0.1 is nearly flat.
    torch.manual_seed(3)
    weights = (torch.randn(5, vocab) * spread).softmax(-1)

    kept = truncate(weights, params(top_p=top_p))
    on_a_gpu = _largest_with_mass(weights, top_p * weights.sum(dim=-1, keepdim=True))
    assert torch.equal(weights.where(weights >= on_a_gpu, 0.0), kept)

    for row, cut in zip(weights, kept, strict=True):
        assert set(cut.nonzero().flatten().tolist()) == sorted_nucleus(row, top_p)
        assert torch.equal(cut[cut > 0], row[cut > 0])


@pytest.mark.parametrize("vocab", [600, 6000])
def test_ties_with_the_last_of_a_nucleus_stay(vocab):
    # Logits of half precision have many ties: 12 different ones here.
    torch.manual_seed(3)
    weights = torch.randint(0, 12, (4, vocab)).float().mul(0.3).softmax(-1)

    kept = truncate(weights, params(top_p=0.5))

    for row, cut in zip(weights, kept, strict=True):
        assert set(cut.nonzero().flatten().tolist()) == sorted_nucleus(row, 0.5)


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 0.5}])
def test_a_row_does_not_depend_on_the_rows_beside_it(settings):
    torch.manual_seed(4)
    logits, noise = torch.randn(16, 40), torch.rand(16)

    tokens, logprobs, _ = choose_tokens(logits, noise, params(**settings))

    for i in range(16):
        alone = choose_tokens(logits[i : i + 1], noise[i : i + 1], params(**settings))
        assert alone[0].item() == tokens[i].item()
        assert alone[1].item() == pytest.approx(logprobs[i].item(), abs=1e-6)


def test_bias_and_penalties_by_hand():
    """Logits 2, -1, 0.5, 3. Token 0 stands in the prompt; 1 was sampled twice, 3 once."""
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0]])
    chosen = params(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0)
    sampled = torch.tensor([[0, 2, 0, 1]], dtype=torch.int32)
    prompted = torch.tensor([[True, False, False, False]])
    bias = torch.tensor([2]), torch.tensor([1.5])

    adjusted = adjust_logits(logits, chosen, bias, sampled, prompted)

    # 2 / 2; -1 * 2 - 2 * 0.5 - 0.25; 0.5 + 1.5; 3 / 2 - 0.5 - 0.25.
    assert adjusted.tolist() == [[1.0, -3.25, 2.0, 0.75]]
    assert logits.tolist() == [[2.0, -1.0, 0.5, 3.0]]
    assert adjust_logits(logits, params(logit_bias={2: 1.5}), bias).tolist() == [[2, -1, 2, 3]]


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest():
    # Shares of the likeliest: 0.25, 0.5, 1, 0.75; the temperature squares them to 0.25, 0.56.
    grid = (torch.arange(9_000) + 0.5) / 9_000
    logits = PROBABILITIES.log()[None].expand(9_000, -1)

    tokens, _, _ = choose_tokens(logits, grid, params(min_p=0.4))
    # 0.2, 0.4, 0.3 of 0.9.
    assert torch.bincount(tokens, minlength=4).tolist() == [0, 2000, 4000, 3000]

    squared, logprobs, _ = choose_tokens(logits, grid, params(min_p=0.4, temperature=0.5))
    # 0.16 and 0.09 of 0.25; log-probs are of all four.
    assert torch.bincount(squared, minlength=4).tolist() == [0, 0, 5760, 3240]
    assert logprobs[0].item() == pytest.approx(math.log(0.16 / 0.30), abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_a_token_s_log_prob_is_that_of_its_entry_among_the_likeliest(temperature):
    """Bit for bit: whoever asks whether a token was the likeliest compares the two."""
    torch.manual_seed(6)
    logits = torch.randn(96, 50) * 3
    chosen = params(temperature=temperature, top_logprobs=50)

    tokens, logprobs, likeliest = choose_tokens(logits, torch.rand(96), chosen)

    ids, values = likeliest
    assert values.diff(dim=1).le(0).all()
    assert torch.equal(values[ids == tokens[:, None]], logprobs)
