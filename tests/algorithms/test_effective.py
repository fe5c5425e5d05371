"""What is reported as used was used: settings that Tune changes under a restored checkpoint."""

from __future__ import annotations

import json

import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.runs.results import read_json_lines
from tests.algorithms import tiny_runs as tiny

# Several updates per batch with a large step, so that clipping decides about tokens.
BASE = {"lr": 3e-3, "num_epochs": 4, "minibatch_size": 4, "ref_kl_coeff": 0.05, "clip_param": 0.2,
        "ptx_coeff": 0.1, "ptx_data": tiny.TEXTS, "ptx_batch_size": 2}  # fmt: skip
PERTURBED = {"lr": 2e-3, "ref_kl_coeff": 0.5, "clip_param": 0.01, "ptx_coeff": 0.3}
OTHERS = {"vf_clip_param": 0.1, "vf_loss_coeff": 0.3, "entropy_coeff": 0.01, "gamma": 0.9,
          "lambda_": 0.8, "grad_clip": 0.5, "weight_decay": 0.02, "adam_epsilon": 1e-6,
          "adam_betas": (0.8, 0.99)}  # fmt: skip


def ppo(**changes) -> AlgorithmConfig:
    return tiny.ppo(**{**BASE, **changes})


def effective_after_one(algorithm) -> dict[str, float]:
    result = algorithm.train()
    learners = result["learners"]  # where RLlib has what its own learners report
    for name, value in result["effective"].items():
        assert learners["default_policy"][f"effective/{name}"] == value
    num_parameters = sum(parameter.numel() for parameter in tiny.weights(algorithm).values())
    assert 0 < learners["__all_modules__"]["num_trainable_parameters"] <= num_parameters
    return result["effective"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, ray_session):
    """Of a trial under `BASE`, one iteration old."""
    with tiny.built(ppo()) as algorithm:
        assert (
            effective_after_one(algorithm).items()
            >= {name: BASE[name] for name in PERTURBED}.items()
        )
        return algorithm.save_to_path(str(tmp_path_factory.mktemp("base") / "checkpoint"))


@pytest.fixture(scope="module")
def unperturbed(checkpoint):
    """Weights one iteration after the checkpoint, nothing changed."""
    with tiny.built(ppo()) as algorithm:
        algorithm.restore_from_path(checkpoint)
        algorithm.train()
        return tiny.weights(algorithm)


def test_a_result_of_two_updates_has_the_means_of_the_last(ray_session):
    """They are no sums: a learning rate of two updates is not twice as large."""
    config = ppo(train_batch_size_per_learner=12).reporting(min_sample_timesteps_per_iteration=13)
    with tiny.built(config) as algorithm:
        steps = []
        algorithm.learner_group.foreach_learner(lambda learner: steps.append(learner.num_updates))
        used = effective_after_one(algorithm)
        algorithm.learner_group.foreach_learner(lambda learner: steps.append(learner.num_updates))
        assert algorithm.training_iteration == 1 and algorithm.learner_metrics() == {}
    assert steps == [0, 2 * BASE["num_epochs"] * 12 // BASE["minibatch_size"]]
    assert used["lr"] == BASE["lr"] and used["clip_param"] == BASE["clip_param"]


@pytest.mark.parametrize("name", PERTURBED)
def test_a_new_trial_uses_its_own_settings_on_another_s_checkpoint(checkpoint, unperturbed, name):
    with tiny.built(ppo(**{name: PERTURBED[name]})) as algorithm:
        algorithm.restore_from_path(checkpoint)
        used = effective_after_one(algorithm)
        weights = tiny.weights(algorithm)
    for other in PERTURBED:
        assert used[other] == {**BASE, name: PERTURBED[name]}[other], other
    with pytest.raises(AssertionError):  # it is not only reported: it makes other weights
        tiny.assert_same_weights(weights, unperturbed)


def test_a_live_actor_that_is_reset_uses_its_new_settings(checkpoint):
    """What Tune does with `reuse_actors`: reset, then restore."""
    with tiny.built(ppo()) as algorithm:
        algorithm.train()
        assert algorithm.reset_config(ppo(**PERTURBED, **OTHERS).to_dict())
        algorithm.restore_from_path(checkpoint)
        used = effective_after_one(algorithm)
        reset = tiny.weights(algorithm)
    with tiny.built(ppo(**PERTURBED, **OTHERS)) as algorithm:
        algorithm.restore_from_path(checkpoint)
        assert effective_after_one(algorithm) == used
        tiny.assert_same_weights(tiny.weights(algorithm), reset)
    betas = dict(zip(("adam_beta1", "adam_beta2"), OTHERS["adam_betas"], strict=True))
    scalars = {name: value for name, value in OTHERS.items() if name != "adam_betas"}
    assert used == {**PERTURBED, **scalars, **betas, "clip_param_high": PERTURBED["clip_param"]}


@pytest.mark.slow  # a learner has it in test_rlhf_learner.py
def test_an_adaptive_coefficient_starts_again_where_it_is_set_anew(checkpoint, tmp_path):
    adaptive = {"ref_kl_target": 2.0, "ref_kl_horizon": 50.0}
    with tiny.built(ppo(**adaptive)) as algorithm:
        algorithm.train()
        path = algorithm.save_to_path(str(tmp_path / "adaptive"))
        now = algorithm.train()["effective"]["ref_kl_coeff"]
    assert now != BASE["ref_kl_coeff"]
    for coeff, used in ((BASE["ref_kl_coeff"], now), (0.5, 0.5)):
        with tiny.built(ppo(**adaptive, ref_kl_coeff=coeff)) as algorithm:
            algorithm.restore_from_path(path)
            assert effective_after_one(algorithm)["ref_kl_coeff"] == used


def test_a_scheduled_learning_rate_is_the_one_that_was_stepped_with():
    decay = {"lr_schedule": "linear", "lr_num_updates": 8}
    with tiny.built(tiny.sft(num_epochs=2, minibatch_size=3, **decay)) as algorithm:
        # 4 updates an iteration; the fourth has seen 3 of 8: 1e-3 * 5/8
        assert effective_after_one(algorithm)["lr"] == pytest.approx(0.625e-3)
    config = tiny.grpo(ref_kl_in="loss", ref_kl_coeff=0.07, clip_param_high=0.28)
    with tiny.built(config) as algorithm:
        used = effective_after_one(algorithm)
        assert (used["ref_kl_coeff"], used["clip_param"], used["clip_param_high"]) == (
            0.07, 0.2, 0.28,
        )  # fmt: skip


@pytest.mark.slow
def test_population_based_training_uses_what_it_mutates(tmp_path):
    """Through the command line: two trials; after every second iteration the worse one goes on
    from the better one's checkpoint with settings of its own."""
    mutations = {
        "lr": {"loguniform": [1e-4, 1e-2]},
        "clip_param": {"uniform": [0.05, 0.4]},
        "ref_kl_coeff": {"loguniform": [0.01, 1.0]},
        "ptx_coeff": [0.1, 0.2, 0.4],
    }
    stage = {
        "run": "PPOPtx", "env": "rllib_llm/RLHF-v0", "stop": {"training_iteration": 6},
        "num_samples": 2, "metric": "objective/scores", "mode": "max", "scheduler": "pbt",
        "scheduler_config": {
            "time_attr": "training_iteration", "perturbation_interval": 2, "synch": True,
            "quantile_fraction": 0.5, "hyperparam_mutations": mutations,
        },
        "config": {
            "model": tiny.MODEL, "train_batch_size_per_learner": 8, "minibatch_size": 4,
            "num_epochs": 2, "max_new_tokens": 4, "log_samples_every": 0,
            "ptx_data": "tests.algorithms.tiny_runs.build_texts", "ptx_batch_size": 2,
            "num_cpus_for_main_process": 0.5,
            "env_config": {"prompts": tiny.PROMPTS, "eval_prompts": tiny.EVAL_PROMPTS,
                           "reward_functions": f"{tiny.HERE}.num_digits", "max_prompt_len": 8},
        },
    }  # fmt: skip
    file = tmp_path / "x.yaml"
    file.write_text(json.dumps({"a": stage}), encoding="utf-8")
    options = ["--storage-path", str(tmp_path), "--experiment-name", "run"]
    result = CliRunner().invoke(app, ["train", "file", str(file), *options])
    assert result.exit_code == 0, result.output

    trials = [read_json_lines(path) for path in (tmp_path / "run" / "a").glob("*/result.json")]
    assert len(trials) == 2
    for row in (row for trial in trials for row in trial):
        for name in mutations:
            assert row["effective"][name] == row["config"][name], (row["training_iteration"], name)
    values = [{row["effective"]["lr"] for row in trial} for trial in trials]
    # Tune's own record of what it changed: one trial at 2 and at 4 iterations, save where it cannot
    # have the better trial's checkpoint at that moment (its "Skip exploit").
    record = (tmp_path / "run" / "a" / "pbt_global.txt").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in record.splitlines()]
    mutated = [new["lr"] for *_, new in lines]
    assert 1 <= len(mutated) <= 2, result.output
    assert set(mutated) <= set.union(*values)
    iterations = [[row["training_iteration"] for row in trial] for trial in trials]
    assert all(set(found) >= {1, 6} for found in iterations), iterations
