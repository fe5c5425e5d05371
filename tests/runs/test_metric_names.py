"""Every result that a run reports is in the registry that the reference page is made from."""

from __future__ import annotations

import pytest

from rllib_llm import GRPOConfig, PPOPtxConfig, RewardModelConfig, SFTConfig
from rllib_llm.runs.metrics import NAMES, describes
from rllib_llm.runs.results import flatten

SUMS = "rllib_llm.examples.arithmetic"
REVIEWS = "rllib_llm.examples.reviews_grammar"
# What RLlib and Tune say of processes, clocks and machines.
OF_RLLIB = {
    "config", "date", "done", "env_runner_group", "fault_tolerance", "hostname", "node_ip", "perf",
    "iterations_since_restore", "num_training_step_calls_per_iteration", "pid", "timers",
    "time_since_restore", "time_this_iter_s", "time_total_s", "timestamp", "trial_id",
}  # fmt: skip


def grpo():
    return (
        GRPOConfig()
        .environment("rllib_llm/Arithmetic-v0")
        .language_model(model=f"{SUMS}.build_model")
        .sampling(max_new_tokens=4)
        .training(
            train_batch_size_per_learner=16,
            off_policy="decoupled",
            rejection="k3",
            rejection_upper=1.0,
        )
        .evaluation(evaluation_interval=1, evaluation_duration=8)
    )


def ppo():
    return (
        PPOPtxConfig()
        .environment("rllib_llm/Arithmetic-v0")
        .language_model(model=f"{SUMS}.build_model")
        .sampling(max_new_tokens=4)
        .training(
            train_batch_size_per_learner=8, minibatch_size=8, num_epochs=1, ref_kl_target=6.0,
            ptx_coeff=0.1, ptx_data=f"{SUMS}.sft_texts", ptx_batch_size=2,
        )
    )  # fmt: skip


def sft():
    config = SFTConfig().language_model(model=f"{SUMS}.build_model")
    config.update_from_dict({"data": f"{SUMS}.sft_texts", "eval_data": f"{SUMS}.sft_texts"})
    return config.training(train_batch_size_per_learner=8).evaluation(evaluation_interval=1)


def reward_model():
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 4
    config = RewardModelConfig().language_model(model=f"{SUMS}.build_model")
    config.update_from_dict({"data": pairs, "eval_data": pairs})
    return config.training(train_batch_size_per_learner=4).evaluation(evaluation_interval=1)


@pytest.mark.parametrize("make", [grpo, ppo, sft, reward_model], ids=lambda make: make.__name__)
def test_every_result_is_described(make, ray_session):
    algo = make().build_algo()
    try:
        results = flatten(algo.train())
    finally:
        algo.stop()
    unknown = {
        name for name in results if not describes(name) and name.partition("/")[0] not in OF_RLLIB
    }
    assert not unknown


def test_names_are_said_once():
    assert len(set(NAMES)) == len(NAMES)
    assert describes("faults/seconds_lost") and not describes("objective/kll")
