from __future__ import annotations

from types import SimpleNamespace

from ray.tune.experimental.output import _infer_user_metrics

from rllib_llm.algorithms.results import HEADLINE, with_headline

RL = {
    "num_training_step_calls_per_iteration": 1,
    "objective": {"scores": 1.5, "kl": 0.25, "entropy": 3.0},
    "train": {"output_length": 12.0},
    "eval": {"scores": 1.25},
    "lr": 1e-5,
    "episode": 64,
}


def test_tunes_table_has_reward_held_out_reward_kl_and_length():
    result = with_headline(RL)
    assert result["reward"] == 1.5 and result["held_out_reward"] == 1.25
    # What Tune's own reporter makes columns of:
    columns = _infer_user_metrics([SimpleNamespace(last_result=result)])
    assert columns == ["reward", "held_out_reward", "kl", "length"]
    assert {key: result[key] for key in RL} == RL  # all else is as it was


def test_a_kl_that_nobody_measured_is_no_column():
    result = with_headline({**RL, "objective": {"scores": 1.5}})
    columns = _infer_user_metrics([SimpleNamespace(last_result=result)])
    assert columns[:3] == ["reward", "held_out_reward", "length"] and "kl" not in columns


def test_other_stages_show_their_losses():
    supervised = {"loss": {"reward_model": 0.6}, "train": {"accuracy": 0.7}}
    assert list(with_headline({**supervised, "eval": {"loss": 0.65, "accuracy": 0.6}}))[:4] == [
        "rm_loss",
        "held_out_loss",
        "accuracy",
        "held_out_accuracy",
    ]
    assert list(with_headline({"loss": {"sft": 2.0}}))[:1] == ["sft_loss"]
    assert all(len(name) <= 20 for name in HEADLINE)  # what a column of Tune has room for


def test_no_column_is_left_to_a_counter():
    """Stages without held-out rows, and a policy without a reference."""
    common = {"num_training_step_calls_per_iteration": 1, "lr": 1e-5, "episode": 64}
    speed = {"throughput": {"tokens_per_s": 100.0}}
    stages = (
        {"loss": {"sft": 2.0}},
        {"loss": {"reward_model": 0.6}, "train": {"accuracy": 0.7}},
        {"loss": {"dpo": 0.6}, "train": {"accuracy": 0.7}},
        {"objective": {"scores": 1.0}, "train": {"output_length": 9.0}},
    )
    for stage in stages:
        result = with_headline({**common, **stage, **speed})
        columns = _infer_user_metrics([SimpleNamespace(last_result=result)])
        assert len(columns) == 4 and set(columns) <= {*HEADLINE}
