"""Samplers that come and go between iterations: what is learnt stays the same, bit for bit."""

from __future__ import annotations

import pytest

from tests.algorithms import tiny_runs as tiny

pytestmark = pytest.mark.usefixtures("ray_session")


def config(num_samplers: int):
    return tiny.grpo().env_runners(num_env_runners=num_samplers).sampling(sampling_parts=2)


@pytest.mark.slow  # samplers in processes of their own
def test_samplers_are_added_and_removed_while_a_run_goes_on():
    with tiny.built(config(1)) as algorithm:
        expected = tiny.train(algorithm, 4)
        weights = tiny.weights(algorithm)
    with tiny.built(config(1)) as algorithm:
        learnt = tiny.train(algorithm, 1)
        assert algorithm.scale_samplers(2) == "2 samplers instead of 1"
        learnt += tiny.train(algorithm, 2)
        pool = algorithm._pools[algorithm.env_runner_group]
        assert pool.num_samplers == 2
        assert algorithm.scale_samplers(1) == "1 samplers instead of 2"
        learnt += tiny.train(algorithm, 1)
        assert pool.faults.sampler_restarts == 0
        assert learnt == expected
        tiny.assert_same_weights(tiny.weights(algorithm), weights)
        with pytest.raises(ValueError, match="samplers=3 must be at most 2.*sampling_parts"):
            algorithm.scale_samplers(3)


def test_runs_without_samplers_are_left_alone():
    with tiny.built(tiny.grpo()) as algorithm, pytest.raises(ValueError, match="num_env_runners"):
        algorithm.scale_samplers(2)
    with (
        tiny.built(tiny.sft()) as algorithm,
        pytest.raises(ValueError, match="SFT has no samplers"),
    ):
        algorithm.scale_samplers(2)
