"""GRPO, RLOO and REINFORCE++ as algorithms: no critic, groups kept whole, the reward rises."""

from __future__ import annotations

import pytest

from rllib_llm.algorithms.reinforce_pp import ReinforcePPConfig
from tests.algorithms import tiny_runs as tiny

pytestmark = pytest.mark.usefixtures("ray_session")


def reinforce(**training):
    return tiny._rlhf(ReinforcePPConfig(), **training)


@pytest.mark.parametrize("config", [tiny.grpo, tiny.rloo, reinforce])
def test_the_reward_rises(config):
    settings = config(lr=1e-2, train_batch_size_per_learner=48, minibatch_size=24,
                      ref_kl_coeff=0.0)  # fmt: skip
    with tiny.built(settings) as algorithm:
        assert not any("value_head" in name for name in tiny.weights(algorithm))
        scores = [m["objective"]["scores"] for m in tiny.train(algorithm, 15)]
    # At first 10 of 18 tokens are digits, 1 ends: about 0.5 of at most 5.
    assert sum(scores[:2]) / 2 < 2.0
    assert sum(scores[-2:]) / 2 > 4.0


@pytest.mark.parametrize("config", [tiny.grpo, tiny.rloo, reinforce])
def test_at_learning_rate_0_nothing_changes(config):
    with tiny.built(config(lr=0.0)) as algorithm:
        before = tiny.weights(algorithm)
        (metrics,) = tiny.train(algorithm, 1)
        # Old log-probs are the sampler's: those of its cached decoding, to float32 round-off.
        assert metrics["val"]["ratio"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["policy"]["approxkl_avg"] < 1e-9
        assert metrics["policy"]["clipfrac_avg"] == 0
        assert "value_avg" not in metrics["loss"] or metrics["loss"]["value_avg"] == 0
        tiny.assert_same_weights(tiny.weights(algorithm), before)


def test_log_probs_recomputed_are_exactly_the_policy_s():
    # Each row alone: an update draws the order of its rows, and products of others round otherwise.
    config = tiny.rloo(
        minibatch_size=None, num_epochs=1, off_policy="decoupled", micro_batch_size=1
    )
    with tiny.built(config) as algorithm:
        result = algorithm.train()
    assert result["val"]["ratio"] == 1.0
    assert result["policy"]["approxkl_avg"] == 0.0
    assert result["sampler"]["logprob_gap"] < 1e-5


@pytest.mark.parametrize("settings", [
    {"loss_reduction": "dr_grpo", "scale_by_std": False},
    {"loss_reduction": "token_mean", "clip_param_high": 0.28, "ref_kl_coeff": 0.0,
     "overlong_buffer": 2, "drop_zero_variance_groups": True},
    {"policy_loss": "gspo", "clip_param": 3e-4, "clip_param_high": 4e-4},
    {"policy_loss": "cispo", "clip_param": 1.0, "clip_param_high": 4.0},
    {"dual_clip": 3.0, "entropy_coeff": 0.01, "missing_eos_penalty": 1.0, "length_penalty": 0.1},
])  # fmt: skip
def test_published_variants_are_settings(settings):
    with tiny.built(tiny.grpo(**settings)) as algorithm:
        before = tiny.weights(algorithm)
        first, second = tiny.train(algorithm, 2)
        after = tiny.weights(algorithm)
    assert any(not after[name].equal(before[name]) for name in before)
    assert first["episode"] == 12 and second["episode"] == 24
    assert second["val"]["ratio"] == pytest.approx(1.0, abs=0.05)


def same_score(completions):
    return [1.0] * len(completions)


def test_an_iteration_whose_groups_teach_nothing_passes():
    """Every group of equal scores is dropped: nothing is left to measure or to learn from."""
    config = tiny.grpo(drop_zero_variance_groups=True, ref_kl_coeff=0.0)
    config.env_config["reward_functions"] = f"{__name__}.same_score"
    with tiny.built(config) as algorithm:
        before = tiny.weights(algorithm)
        result = algorithm.train()
        assert result["train"]["zero_variance_groups"] == 1.0
        assert result["objective"]["scores"] == 1.0
        tiny.assert_same_weights(tiny.weights(algorithm), before)
