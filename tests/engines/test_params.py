"""Settings of a generation are checked where they enter."""

from __future__ import annotations

import pytest

from rllib_llm.engines.params import SamplingParams
from rllib_llm.shared.errors import Problems


def test_defaults_sample_the_plain_distribution():
    params = SamplingParams(pad_token_id=0)

    assert (params.temperature, params.top_p, params.top_k, params.greedy) == (1.0, 1.0, 0, False)
    assert params.stop_token_ids == ()


def test_stop_token_ids_become_a_tuple():
    assert SamplingParams(pad_token_id=0, stop_token_ids=[2, 5]).stop_token_ids == (2, 5)


def test_min_equal_to_max_new_tokens_is_allowed():
    SamplingParams(pad_token_id=0, min_new_tokens=4, max_new_tokens=4)


@pytest.mark.parametrize(
    ("settings", "name", "rule"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens", "be at least 1"),
        ({"min_new_tokens": -1}, "min_new_tokens", "be within 0 and max_new_tokens=64"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens", "be within 0 and max_new"),
        ({"temperature": 0.0}, "temperature", "be finite, >= 1e-05"),
        ({"temperature": float("nan")}, "temperature", "be finite"),
        ({"temperature": 1e-6}, "temperature", "be finite"),
        ({"temperature": float("inf")}, "temperature", "be finite"),
        ({"top_k": -1}, "top_k", "be 0"),
        ({"top_p": 0.0}, "top_p", "be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p", "be above 0 and at most 1"),
        ({"top_logprobs": -1}, "top_logprobs", "be 0"),
        ({"min_p": 1.1}, "min_p", "be within 0"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "be within -2 and 2"),
        ({"presence_penalty": float("nan")}, "presence_penalty", "be within -2 and 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "be within 0.01 and 100"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty", "be within 0.01 and 100"),
        ({"logit_bias": {3: 101}}, "logit_bias", "be of numbers within -100 and 100"),
        ({"logit_bias": {-3: 1}}, "logit_bias", "be of distinct ids of 0 or more"),
        ({"pad_token_id": -1}, "pad_token_id", "be 0 or more"),
        ({"stop_token_ids": (-2,)}, "stop_token_ids", "be ids of 0 or more"),
        ({"stop_token_ids": (2, 2)}, "stop_token_ids", "be distinct"),
    ],
)
def test_a_wrong_value_is_named_with_its_rule(settings, name, rule):
    with pytest.raises(Problems) as caught:
        SamplingParams(**{"pad_token_id": 0, **settings})
    (problem,) = caught.value.found
    assert problem.name == name and problem.rule.startswith(rule)


def test_all_wrong_values_are_named_at_once():
    with pytest.raises(Problems) as caught:
        SamplingParams(pad_token_id=0, top_k=-1, temperature=0.0)
    assert [problem.name for problem in caught.value.found] == ["temperature", "top_k"]


def test_a_bias_may_be_a_mapping_and_makes_equal_settings():
    one = SamplingParams(pad_token_id=0, logit_bias={7: 1, 2: -3.5})

    assert one == SamplingParams(pad_token_id=0, logit_bias=((2, -3.5), (7, 1.0)))
    assert hash(one) and one.adjustments == {"logit_bias": {2: -3.5, 7: 1.0}}


def test_what_is_off_is_not_asked_of_other_engines():
    plain = SamplingParams(pad_token_id=0)
    adjusted = SamplingParams(pad_token_id=0, min_p=0.1, repetition_penalty=1.5, greedy=True)

    assert plain.drawn_by == {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert not plain.has_penalties and not plain.adjustments
    # A greedy choice is the likeliest one: min_p has nothing to cut.
    assert adjusted.drawn_by == {
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.5,
    }  # fmt: skip
