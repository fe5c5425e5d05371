"""Sampling ahead: one update stale, said so, the same for any number of samplers, and resumable."""

from __future__ import annotations

import warnings

import pytest
import torch

from rllib_llm import columns
from tests.algorithms import tiny_runs as tiny

pytestmark = pytest.mark.usefixtures("ray_session")


def ahead(num_samplers: int = 2):
    return tiny.grpo().sampling(pipeline_depth=1).env_runners(num_env_runners=num_samplers)


@pytest.fixture(scope="module")
def undisturbed():
    """Metrics, weights and the batch waiting after four iterations with two samplers."""
    with tiny.built(ahead()) as algorithm:
        return tiny.train(algorithm, 4), tiny.weights(algorithm), algorithm.rollouts._take().columns


def assert_same_columns(one, other):
    assert one.keys() == other.keys()
    for name, column in one.items():
        assert torch.equal(column, other[name]), name


def test_the_first_batch_is_fresh_and_all_others_one_update_old(undisturbed):
    metrics, _, waiting = undisturbed
    assert [m["train"]["staleness"] for m in metrics] == [0.0, 1.0, 1.0, 1.0]
    # Four updates are done; what waits was started before the fourth.
    mask, versions = waiting[columns.COMPLETION_MASK], waiting[columns.WEIGHTS_VERSION]
    assert len(mask) == 12 and set(versions[mask].tolist()) == {3}
    # Positions go on without gap: four iterations of four prompts, three rows each.
    assert waiting[columns.ROW_ID].tolist() == list(range(48, 60))


def test_the_second_batch_is_what_the_first_weights_sample():
    with tiny.built(ahead(1)) as algorithm:
        tiny.train(algorithm, 1)
        second = algorithm.rollouts._take().columns
    with tiny.built(tiny.grpo()) as untrained:
        untrained.rollouts.position = 4
        expected = untrained.rollouts._take().columns
    assert_same_columns(second, expected)


def test_the_log_probs_are_of_the_policy_that_sampled(undisturbed):
    """The learner's ratio is taken against them: on policy at first, not so afterwards."""
    assert undisturbed[0][0]["val"]["ratio"] == pytest.approx(1.0, abs=0.05)
    with tiny.built(ahead(1).training(num_epochs=1, minibatch_size=12)) as algorithm:
        ratios = [algorithm.train()["policy"]["approxkl_avg"] for _ in range(2)]
    assert ratios[0] == pytest.approx(0.0, abs=1e-9)
    assert ratios[1] > 1e-6


def test_one_sampler_learns_what_two_learn(undisturbed):
    with tiny.built(ahead(1)) as algorithm:
        assert tiny.train(algorithm, 4) == undisturbed[0]
        tiny.assert_same_weights(tiny.weights(algorithm), undisturbed[1])


def test_a_restored_run_goes_on_as_if_nothing_had_happened(undisturbed, tmp_path):
    """A checkpoint holds the batch sampled ahead; restoring a live run drops a later one."""
    with tiny.built(ahead()) as algorithm:
        metrics = tiny.train(algorithm, 2)
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        tiny.train(algorithm, 1)
        algorithm.restore_from_path(path)
        assert metrics + tiny.train(algorithm, 2) == undisturbed[0]
        tiny.assert_same_weights(tiny.weights(algorithm), undisturbed[1])
    with tiny.built(ahead(1)) as other:
        other.restore_from_path(path)
        assert metrics + tiny.train(other, 2) == undisturbed[0]
        tiny.assert_same_weights(tiny.weights(other), undisturbed[1])


class FailLater:
    """Judges one batch and no other."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, completions):
        self.num_calls += 1
        if self.num_calls > 1:
            raise KeyError("no judge any more")
        return tiny.num_digits(completions)


def test_a_failure_ahead_is_raised_where_its_batch_is_wanted():
    config = ahead(1)
    config.env_config["reward_functions"] = {"function": f"{__name__}.FailLater", "kwargs": {},
                                             "name": "later"}  # fmt: skip
    with tiny.built(config) as algorithm:
        algorithm.train()
        with pytest.raises(RuntimeError, match="no judge any more"):
            algorithm.train()


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match=r"pipeline_depth=2 must be one of \(0, 1\)"):
        tiny.grpo().sampling(pipeline_depth=2).validate()
    recomputed = tiny.ppo(critic="shared").sampling(pipeline_depth=1)
    recomputed.language_model(autocast_dtype="bfloat16")
    with pytest.raises(ValueError, match="off_policy=None must be set with pipeline_depth=1"):
        recomputed.validate()
    with pytest.warns(UserWarning, match="pipeline_depth=1 has no effect with num_env_runners=0"):
        tiny.grpo().sampling(pipeline_depth=1).validate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ahead().training(off_policy="decoupled", off_policy_weights="mask").validate()
