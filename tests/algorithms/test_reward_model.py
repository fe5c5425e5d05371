"""Reward models as an algorithm: accuracy, the scale of scores, and the policy that they judge."""

from __future__ import annotations

import pytest

from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT
from rllib_llm.envs.frozen_models import RewardModelScorer
from tests.algorithms import tiny_runs as tiny

pytestmark = pytest.mark.usefixtures("ray_session")


def test_it_learns_to_tell_the_pairs_apart_and_reports():
    config = tiny.reward_model(lr=1e-2, eval_data=tiny.PAIRS, train_batch_size_per_learner=8)
    config.evaluation(evaluation_interval=5)
    with tiny.built(config) as algorithm:
        results = [algorithm.train() for _ in range(20)]
    last = results[-1]
    assert last["train"]["accuracy"] == last["eval"]["accuracy"] == 1.0
    assert last["eval"]["loss"] == pytest.approx(last["loss"]["reward_model"], rel=0.5)
    assert last["eval"]["loss"] < 0.2  # chance is log 2 = 0.69
    assert last["eval"]["score_std"] > 0
    assert last["episode"] == 160


def test_a_policy_is_judged_by_it_in_units_of_its_own_deviation(tmp_path):
    """Stage two of the main job: scores of the held-out texts have mean 0 and deviation 1, and a
    separate critic begins from the same model."""
    config = tiny.reward_model(lr=1e-2, eval_data=tiny.PAIRS, train_batch_size_per_learner=8)
    with tiny.built(config) as algorithm:
        tiny.train(algorithm, 5)
        algorithm.save_checkpoint(str(tmp_path / "checkpoint"))
    folder = str(tmp_path / "checkpoint" / MODEL_IN_CHECKPOINT)
    tokenizer = tiny.build_model()[1]
    scorer = RewardModelScorer(folder, tokenizer=tokenizer)
    scores = []
    for name in ("chosen", "rejected"):
        ids = [
            tokenizer(pair["prompt"] + pair[name])["input_ids"] + [tokenizer.eos_token_id]
            for pair in tiny.PAIRS
        ]
        scores += [score_of(scorer, row) for row in ids]
    mean = sum(scores) / len(scores)
    deviation = (sum((s - mean) ** 2 for s in scores) / len(scores)) ** 0.5
    assert mean == pytest.approx(0.0, abs=1e-3)
    assert deviation == pytest.approx(1.0, abs=1e-3)

    config = tiny.ppo(critic="separate", critic_model=folder)
    config.env_config.update(reward_functions=None, reward_model=folder)
    with tiny.built(config) as algorithm:
        (metrics,) = tiny.train(algorithm, 1)
    assert metrics["train"]["rewards"] == metrics["train"]["reward_model_rewards"]
    assert -5 < metrics["objective"]["scores"] < 5


def score_of(scorer, ids):
    import torch

    row = torch.tensor([ids])
    mask = torch.ones_like(row, dtype=torch.bool)
    return float(scorer(row[:, :-1], mask[:, :-1], row[:, -1:], mask[:, -1:])[0])
