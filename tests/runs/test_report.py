from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rllib_llm.data.rollout_store import STORE_FILE
from rllib_llm.runs.experiments import Experiment
from rllib_llm.runs.report import report
from rllib_llm.runs.results import StageResult
from tests.cli.said import said


def finished_stage(folder: Path, scores: list[float], model_class: str) -> StageResult:
    """A stage of one trial, as if it had run and reported these scores."""
    trial = folder / "rl" / "PPOPtx_0"
    (trial / "model").mkdir(parents=True)
    (trial / "model" / "config.json").write_text(json.dumps({"architectures": [model_class]}))
    rows = [
        {
            "training_iteration": i + 1,
            "episode": 10 * (i + 1),
            "time_total_s": 2.0 * (i + 1),
            "objective": {"scores": score, "kl": 0.1 * i},
        }
        for i, score in enumerate(scores)
    ]
    (trial / "result.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return StageResult(
        name="rl",
        algorithm="PPOPtx",
        folder=folder / "rl",
        trial_folders=[trial],
        labels=["trial 1"],
        best=0,
        model=trial / "model",
        checkpoint=trial / "checkpoint_000000",
        metrics={"objective/scores": scores[-1]},
    )


def reported(result: StageResult, folder: Path, **criteria: float) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=120)
    experiment = Experiment("rl", "PPOPtx", pass_criteria=criteria)
    passed = report([result], [experiment], folder, console)
    return passed, said(console.file.getvalue())


def test_the_report_says_what_changed_and_where_everything_is(tmp_path):
    result = finished_stage(tmp_path, [0.5, 1.0, 2.25], "LlamaForCausalLM")
    passed, text = reported(result, tmp_path)
    assert passed
    assert "rl · PPOPtx, 6 s of training" in text
    assert "reward 0.500 2.250" in text and "episodes 10 30" in text
    assert "Losses and rates: means over an iteration's updates" in text
    assert "model (Hugging Face) rl/PPOPtx_0/model" in text
    assert "curves and report rl/report.html" in text
    assert f"rllib generate {result.model}" in text
    assert f"tensorboard --logdir {tmp_path}" in text


def test_only_what_was_evaluated_is_to_be_evaluated_again(tmp_path):
    result = finished_stage(tmp_path, [0.5, 1.0], "LlamaForCausalLM")
    assert "rllib evaluate" not in reported(result, tmp_path)[1]
    result.metrics["eval/scores"] = 1.0
    assert f"rllib evaluate {result.checkpoint}" in reported(result, tmp_path)[1]


def test_what_was_stored_is_to_be_sampled_anew(tmp_path):
    result = finished_stage(tmp_path, [0.5, 1.0], "LlamaForCausalLM")
    assert "rllib verify" not in reported(result, tmp_path)[1]
    (result.best_trial_folder / "rollouts").mkdir()
    (result.best_trial_folder / "rollouts" / STORE_FILE).write_text("{}")
    assert f"rllib verify {result.folder}" in reported(result, tmp_path)[1]


def test_the_next_commands_are_words_of_a_shell(tmp_path):
    stage = finished_stage(tmp_path / "my [run]", [1.0], "GPT2LMHeadModel")
    _, text = reported(stage, tmp_path / "my [run]")
    assert f"rllib generate '{stage.model}'" in text


def test_a_reward_model_is_not_offered_for_conversation(tmp_path):
    result = finished_stage(tmp_path, [0.5, 1.0], "LlamaForSequenceClassification")
    assert "rllib generate" not in reported(result, tmp_path)[1]


def test_a_causal_model_of_any_name_is_offered_for_conversation(tmp_path):
    result = finished_stage(tmp_path, [0.5, 1.0], "GPT2LMHeadModel")
    assert f"rllib generate {result.model}" in reported(result, tmp_path)[1]


@pytest.mark.parametrize(
    ("criteria", "passed", "message"),
    [
        ({"objective/scores": 2.0}, True, "passed rl: objective/scores = 2.25, at least 2 wanted"),
        ({"objective/scores": 2.5}, False, "not passed rl: objective/scores = 2.25"),
        ({"absent": 0.0}, False, "not passed rl: absent = missing"),
        ({"objective/scores": 2.0, "absent": 0.0}, False, "absent = missing"),
    ],
)
def test_pass_criteria_decide(tmp_path, criteria: dict, passed: bool, message: str):
    result = finished_stage(tmp_path, [0.5, 2.25], "LlamaForCausalLM")
    verdict, text = reported(result, tmp_path, **criteria)
    assert verdict is passed
    assert message in text


def test_a_criterion_of_an_older_evaluation_says_of_which_iteration(tmp_path):
    result = finished_stage(tmp_path, [0.5, 2.25], "LlamaForCausalLM")
    result.metrics |= {"eval/scores": 0.5, "eval/iteration": 0.0, "training_iteration": 2.0}
    _, text = reported(result, tmp_path, **{"eval/scores": 1.0})
    assert "not passed rl: eval/scores = 0.5 (of iteration 0 of 2), at least 1 wanted" in text


def test_the_report_says_what_to_look_at(tmp_path):
    result = finished_stage(tmp_path, [1.0, 1.0, 1.0], "LlamaForCausalLM")
    file = result.best_trial_folder / "result.json"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["objective"]["scores_std"] = 0.0
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, text = reported(result, tmp_path)
    assert "look: iteration 3: every completion gets the same reward, 1," in text


def test_a_kl_that_nobody_measured_is_not_shown(tmp_path):
    result = finished_stage(tmp_path, [0.5, 1.0], "LlamaForCausalLM")
    file = result.best_trial_folder / "result.json"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        del row["objective"]["kl"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "KL" not in reported(result, tmp_path)[1]


@pytest.mark.parametrize(
    ("made_at", "row"),
    [((0, 0, 0), "1.000 –"), ((0, 0, 2), "1.000 3.000"), ((None, 2, 2), "– 2.000")],
)
def test_a_held_out_result_stands_at_the_end_at_which_it_was_made(tmp_path, made_at, row):
    """One from before training is not what training led to."""
    result = finished_stage(tmp_path, [0.5, 1.0, 2.0], "LlamaForCausalLM")
    file = result.best_trial_folder / "result.json"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for line, made in zip(rows, made_at, strict=True):
        if made is not None:
            scores = 1.0 + made_at.index(made) if made else 1.0
            line["eval"] = {"scores": scores, "iteration": made}
    file.write_text("".join(json.dumps(line) + "\n" for line in rows))
    assert f"held out {row}" in reported(result, tmp_path)[1]


def test_paths_are_whole_in_a_narrow_terminal(tmp_path):
    result = finished_stage(tmp_path, [0.5, 1.0], "LlamaForCausalLM")
    result.checkpoint = result.best_trial_folder / "a_folder" / "checkpoint_000000"
    console = Console(file=io.StringIO(), width=40)
    report([result], [Experiment("rl", "PPOPtx")], tmp_path, console)
    lines = console.file.getvalue().splitlines()
    assert any(line.endswith("  rl/PPOPtx_0/a_folder/checkpoint_000000") for line in lines)


def test_the_results_of_each_trial_are_read_once(tmp_path, monkeypatch):
    best = finished_stage(tmp_path, [0.5, 2.25], "LlamaForCausalLM")
    other = finished_stage(tmp_path / "second", [0.5, 1.0], "LlamaForCausalLM")
    folders = [other.best_trial_folder, best.best_trial_folder]
    both = replace(best, trial_folders=folders, labels=["lr=1", "lr=2"], best=1)
    read: list[Path] = []
    opened = Path.read_text

    def read_text(path, *args, **kwargs):
        read.append(path)
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    text = reported(both, tmp_path)[1]
    assert sorted(p for p in read if p.name == "result.json") == sorted(
        folder / "result.json" for folder in folders
    )
    assert "best of 2 trials: lr=2" in text
    assert "lr=1 2 20 1.000" in text and "lr=2 2 20 2.250" in text, text
    assert "were ended earlier" not in text


def test_trials_that_were_ended_earlier_are_told_of(tmp_path):
    best = finished_stage(tmp_path, [0.5, 1.5, 2.25], "LlamaForCausalLM")
    other = finished_stage(tmp_path / "second", [0.5], "LlamaForCausalLM")
    folders = [other.best_trial_folder, best.best_trial_folder]
    both = replace(best, trial_folders=folders, labels=["lr=1", "lr=2"], best=1)
    text = reported(both, tmp_path)[1]
    assert "lr=1 1 10 0.500" in text and "lr=2 3 30 2.250" in text, text
    assert "Trials with fewer iterations were ended earlier" in text


def test_an_offline_run_of_wandb_is_named(tmp_path):
    result = finished_stage(tmp_path, [0.5, 1.0], "LlamaForCausalLM")
    assert "wandb sync" not in reported(result, tmp_path)[1]
    (result.best_trial_folder / "wandb" / "offline-run-20261126_1-a").mkdir(parents=True)
    assert f"wandb sync {tmp_path}/*/*/wandb/offline-run-*" in reported(result, tmp_path)[1]
