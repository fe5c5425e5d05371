"""PPO-ptx as an algorithm: nothing happens at learning rate 0, and Tune knows all its names."""

from __future__ import annotations

import pytest
from ray import tune

from rllib_llm.algorithms.ppo_ptx import PPOPtxConfig
from tests.algorithms import tiny_runs as tiny

pytestmark = pytest.mark.usefixtures("ray_session")

KNOWN_NAMES = [
    "eps", "episode", "lr",
    "objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward",
    "objective/scores",
    "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg",
    "loss/policy_avg", "loss/value_avg", "loss/ptx_avg",
    "val/clipfrac_avg", "val/ratio", "val/ratio_var", "val/num_eos_tokens",
    "train/rewards", "train/format_rewards", "train/correct_rewards", "train/output_length",
    "env/distinct",
    "weights/version", "weights/bytes", "weights/publish_seconds", "weights/load_seconds",
    "eval/scores", "eval/correct_rewards",
    "throughput/tokens_per_s",
]  # fmt: skip


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_at_learning_rate_0_nothing_changes(critic):
    with tiny.built(tiny.ppo(lr=0.0, critic=critic)) as algorithm:
        before = tiny.weights(algorithm)
        for metrics in tiny.train(algorithm, 2):
            assert metrics["val"]["ratio"] == pytest.approx(1.0, abs=1e-6)
            assert metrics["val"]["ratio_var"] == pytest.approx(0.0, abs=1e-6)
            # Rows meet others in each mini-batch: round-off of a log-prob, squared.
            assert metrics["policy"]["approxkl_avg"] < 1e-12
            assert metrics["policy"]["clipfrac_avg"] == 0
        tiny.assert_same_weights(tiny.weights(algorithm), before)


def test_the_first_update_is_exactly_on_policy():
    # The sampler's own log-probs differ from the learner's in their last bit, and so do those of a
    # row among others: an update draws their order.
    config = tiny.ppo(minibatch_size=None, num_epochs=1, off_policy="decoupled",
                      off_policy_weights=None, micro_batch_size=1)  # fmt: skip
    with tiny.built(config) as algorithm:
        for metrics in tiny.train(algorithm, 2):
            assert metrics["val"]["ratio"] == 1.0
            assert metrics["val"]["ratio_var"] == 0.0
            assert metrics["policy"]["approxkl_avg"] == 0.0
            assert metrics["policy"]["clipfrac_avg"] == 0.0


def test_the_reward_rises():
    config = tiny.ppo(lr=1e-2, train_batch_size_per_learner=48, minibatch_size=24,
                      ref_kl_coeff=0.0)  # fmt: skip
    with tiny.built(config) as algorithm:
        scores = [m["objective"]["scores"] for m in tiny.train(algorithm, 15)]
    # At first 10 of 18 tokens are digits, 1 ends: about 0.5 of at most 5.
    assert sum(scores[:2]) / 2 < 2.0
    assert sum(scores[-2:]) / 2 > 4.0


@pytest.mark.slow
def test_tune_runs_two_trials_and_knows_every_name(tmp_path):
    config = (
        PPOPtxConfig()
        .language_model(model=tiny.MODEL)
        .environment("rllib_llm/Arithmetic-v0", env_config={"num_problems": 30})
        .sampling(max_new_tokens=4)
        .training(
            lr=tune.grid_search([1e-3, 1e-4]), train_batch_size_per_learner=8, minibatch_size=8,
            num_epochs=1, ptx_coeff=0.1, ptx_data=tiny.TEXTS, ptx_batch_size=2,
        )
        .evaluation(evaluation_interval=1, evaluation_duration=3)
    )  # fmt: skip
    tuner = tune.Tuner(
        "PPOPtx",
        param_space=config,
        run_config=tune.RunConfig(
            stop={"training_iteration": 2}, storage_path=str(tmp_path), name="two", verbose=0
        ),
    )
    results = tuner.fit()
    assert results.num_errors == 0
    frame = results.get_dataframe()
    assert [name for name in KNOWN_NAMES if name not in frame.columns] == []
    assert not frame[KNOWN_NAMES].isna().any().any()
    assert sorted(frame["lr"]) == pytest.approx([1e-4, 1e-3])
    assert frame["episode"].tolist() == [16, 16]
    assert frame["weights/version"].tolist() == [2, 2]
    # Both trials sampled their first batch with the same weights, and went apart after it.
    assert frame["loss/policy_avg"].nunique() == 2
