"""Every prompt answered once, in order, whoever dies; failures raised at once with their reason."""

from __future__ import annotations

import pytest

from rllib_llm.sampling import collect as module
from rllib_llm.sampling.collect import SamplingError, collect
from rllib_llm.sampling.request import SampleRequest
from tests.algorithms import tiny_runs as tiny
from tests.sampling.tiny_samplers import (
    ScriptedGroup,
    assert_same_batch,
    build_sampler,
    publication,
)

REQUEST = SampleRequest(position=5, num_prompts=7, num_completions=2)


@pytest.fixture(autouse=True)
def no_delays(monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_PROBES", 0.0)


@pytest.fixture(scope="module")
def samplers():
    return [build_sampler(tiny.grpo(), worker_index=i + 1) for i in range(3)]


@pytest.fixture(scope="module")
def expected(samplers):
    return samplers[0].serve(REQUEST, publication())


@pytest.mark.parametrize("num_samplers, starts", [(1, [0]), (2, [0, 3]), (3, [0, 2, 4])])
def test_the_prompts_are_cut_into_one_part_per_sampler(samplers, expected, num_samplers, starts):
    group = ScriptedGroup(samplers[:num_samplers])
    assert_same_batch(collect(group, REQUEST, publication()), expected)
    assert group.served == [(i + 1, start) for i, start in enumerate(starts)]


def test_more_samplers_than_prompts_leaves_some_idle(samplers):
    group = ScriptedGroup(samplers)
    batch = collect(group, SampleRequest(0, 2, 2), publication())
    assert batch.num_rows == 4
    assert group.served == [(1, 0), (2, 1)]


@pytest.mark.parametrize("dies", [
    [True],  # the first of two: the other takes its part over
    [False, True],
    [True, True],  # both: they come back
    [True, True, True, False, True],
])  # fmt: skip
def test_a_death_changes_nothing_in_the_batch(samplers, expected, dies):
    group = ScriptedGroup(samplers[:2], dies=dies)
    assert_same_batch(collect(group, REQUEST, publication()), expected)


def test_samplers_have_time_to_come_back(samplers, expected):
    """A restart takes far longer than a few probes."""
    group = ScriptedGroup(samplers[:1], dies=[True], revives_after=50)
    assert_same_batch(collect(group, REQUEST, publication()), expected)


def test_samplers_that_die_whenever_they_are_asked_end_the_run(samplers):
    group = ScriptedGroup(samplers[:2], dies=[True] * 100)
    with pytest.raises(SamplingError, match="all that were asked died, 3 times in a row"):
        collect(group, REQUEST, publication())


def test_samplers_that_never_come_back_end_the_run(samplers, monkeypatch):
    monkeypatch.setattr(module, "MAX_SECONDS_WITHOUT_SAMPLERS", 0.05)
    group = ScriptedGroup(samplers[:2], dies=[True] * 2, revives_after=10**9)
    with pytest.raises(SamplingError, match="num_healthy_samplers=0 must be at least 1: none came"):
        collect(group, REQUEST, publication())


def no_judge(completions, prompts):
    raise KeyError("no such judge")


def test_an_exception_in_a_sampler_is_raised_with_its_traceback_by_the_first_answer():
    config = tiny.grpo()
    config.env_config["reward_functions"] = no_judge
    group = ScriptedGroup([build_sampler(config, worker_index=i) for i in (1, 2)])
    with pytest.raises(SamplingError) as caught:
        collect(group, REQUEST, publication())
    message = str(caught.value)
    assert "RewardError: reward function 'no_judge' must judge at least one" in message
    assert "Traceback (most recent call last)" in message
    assert "KeyError: 'no such judge'" in message
    assert "prompt '" in message and "completion '" in message
    assert len(group.served) == 2  # nobody is asked again
