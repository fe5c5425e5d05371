"""Generation by a user's function: asked for each prompt, checked, judged like any other."""

from __future__ import annotations

import asyncio
import re

import pytest
import torch

from rllib_llm.rollouts.generate_function import Generated
from rllib_llm.rollouts.judged_batch import SampleRequest
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.algorithms import tiny_runs as tiny
from tests.rollouts.tiny_samplers import build_sampler, dealt, judged, publication

REQUEST = SampleRequest(position=2, num_prompts=3, num_completions=2)


async def as_the_policy(asked):
    ended = await asyncio.gather(*[asked.complete(i) for i in range(asked.num_completions)])
    return [Generated(e.token_ids, e.logprobs) for e in ended]


def as_the_policy_in_threads(asked):
    ended = [asked.complete_now(i) for i in range(asked.num_completions)]
    return [Generated(e.token_ids, e.logprobs) for e in ended]


def with_a_word_before(asked):
    """Tokens that the policy did not sample, then one turn of its own."""
    word = asked.prompt_ids[:2]
    made = []
    for i in range(asked.num_completions):
        rest = asked.complete_now(i, word).token_ids[:1]
        made.append(Generated([*word, *rest], [0.0, 0.0, -1.0], sampled=[False, False, True]))
    return made


def sampler(function):
    config = tiny.grpo().sampling(generate_function=f"{__name__}.{function}")
    return build_sampler(config, worker_index=1)


def serve(function):
    answer = dealt(sampler(function), REQUEST, publication())
    if not hasattr(answer, "columns"):
        raise Problems(answer.error)
    return answer


@pytest.mark.parametrize("function", ["as_the_policy", "as_the_policy_in_threads"])
def test_a_function_that_asks_the_policy_gives_what_the_policy_gives(function):
    expected = judged(build_sampler(tiny.grpo(), worker_index=1), REQUEST, publication())
    found = serve(function)
    for name, column in expected.columns.items():
        same = torch.allclose if column.is_floating_point() else torch.equal
        assert same(found.columns[name], column), name


def test_tokens_that_the_policy_did_not_sample_are_not_learnt_from():
    held = serve("with_a_word_before").columns
    assert held[columns.COMPLETION_MASK].all()
    assert held[columns.LOSS_MASK].tolist() == [[False, False, True]] * 6
    assert held[columns.WEIGHTS_VERSION].tolist() == [[-1, -1, 0]] * 6


def too_few(asked):
    return [Generated([5], [-1.0])]


def too_long(asked):
    return [Generated([5] * 6, [-1.0] * 6)] * asked.num_completions


def unknown_token(asked):
    return [Generated([10_000], [-1.0])] * asked.num_completions


def no_logprobs(asked):
    return [Generated([5, 6], [-1.0])] * asked.num_completions


def probabilities(asked):
    return [Generated([5], [0.3])] * asked.num_completions


def texts(asked):
    return ["5"] * asked.num_completions


@pytest.mark.parametrize("function, name", [
    ("too_few", "completions of generate_function"), ("too_long", "len(token_ids)"),
    ("unknown_token", "token_ids"), ("no_logprobs", "len(logprobs)"), ("probabilities", "logprobs"),
    ("texts", "a completion"),
])  # fmt: skip
def test_what_cannot_be_learnt_from_is_refused(function, name):
    with pytest.raises(Problems, match=f"Problems: {re.escape(name)}=.* must be"):
        serve(function)


def test_settings_that_cannot_be():
    config = tiny.grpo().sampling(generate_function="tests.no_such.function")
    with pytest.raises(ValueError, match="generate_function='tests.no_such.function' must name"):
        config.validate()
