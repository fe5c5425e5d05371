from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray
import yaml
from typer.testing import CliRunner

import rllib_llm
from rllib_llm.cli.main import app
from rllib_llm.cli.options import RunOptions, laid_over
from rllib_llm.cli.train import resume_command
from rllib_llm.runs.results import StageResult, read_results
from rllib_llm.runs.run_folder import alone_in
from rllib_llm.shared.run_layout import RUN_RECORD
from tests.algorithms import tiny_runs as tiny
from tests.cli.said import said
from tests.runs.tiny_trainables import COUNTER, Counter

TWO_STAGES = {
    "first": {
        "run": COUNTER,
        "stop": {"training_iteration": 2},
        "config": {"model": "org/base"},
    },
    "second": {
        "run": COUNTER,
        "stop": {"training_iteration": 3},
        "config": {"model": "${first.model}", "lr": 2.0},
        "checkpoint_config": {"checkpoint_frequency": 1},
        "pass_criteria": {"objective/scores": 5.5, "eval/scores": 9},
    },
}


@pytest.fixture
def run(tmp_path, ray_session):
    """Runs `rllib train file` on experiments with results in tmp_path/results."""

    def run_file(experiments: dict, *arguments: str):
        file = tmp_path / "x.yaml"
        file.write_text(yaml.safe_dump(experiments, sort_keys=False), encoding="utf-8")
        storage = ["--storage-path", str(tmp_path / "results"), "--experiment-name", "run"]
        # Ray gathers what runs write by the second in which they begin and the experiment's name:
        # trials of the test before came into this one's folder.
        session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
        shutil.rmtree(session / "artifacts", ignore_errors=True)
        return CliRunner().invoke(app, ["train", "file", str(file), *storage, *arguments])

    return run_file


@pytest.mark.slow  # trials in processes of their own
def test_stages_run_in_order_each_with_what_the_earlier_one_made(run, tmp_path):
    result = run(TWO_STAGES, "--as-test")
    assert result.exit_code == 1, result.output  # a pass criterion is missed
    folder = tmp_path / "results" / "run"
    first, second = (StageResult.load(folder / name) for name in ("first", "second"))
    made_from = json.loads((second.model / "config.json").read_text())["made_from"]
    assert made_from == str(first.model) == str(first.best_trial_folder / "model")
    assert second.metrics["objective/scores"] == 6.0  # 3 iterations of lr = 2
    assert second.metrics["training_iteration"] == 3
    names = [file.name for file in second.best_trial_folder.iterdir()]
    assert {"result.json", "progress.csv", "params.json", "samples.jsonl", "model"} <= set(names)
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert '"name":"training"' in (folder / "second" / "report.html").read_text()  # a curve

    text = said(result.output)
    assert "number 1" in text and "number 3" in text  # before and after
    assert "passed second: objective/scores = 6, at least 5.5 wanted" in text
    assert "not passed second: eval/scores = 3 (of iteration 2 of 3), at least 9 wanted" in text
    assert f"Everything is in {folder}" in text
    assert f"rllib generate {second.model}" in text
    assert f"rllib evaluate {second.checkpoint}" in text


@pytest.mark.slow  # trials in processes of their own
def test_of_several_trials_the_best_one_is_handed_on(run, tmp_path):
    search = {"a": {**TWO_STAGES["first"], "config": {"lr": {"grid_search": [3.0, 1.0]}}}}
    result = run(search)
    assert result.exit_code == 0, result.output
    stage = StageResult.load(tmp_path / "results" / "run" / "a")
    assert stage.labels == ["lr=3", "lr=1"] or stage.labels == [
        "lr=1.0",
        "lr=3.0",
        "lr=2.0",
    ]
    assert (stage.best, stage.metrics["objective/scores"]) == (0, 6.0)
    text = said(result.output)
    assert "best of 2 trials: lr=3" in text and "lr=1 2 20 2.000 0.500" in text


@pytest.mark.slow  # trials in processes of their own
def test_a_failed_run_says_why_and_resume_goes_on(run, tmp_path):
    failing = {**TWO_STAGES, "second": {**TWO_STAGES["second"]}}
    failing["second"]["config"] = {**TWO_STAGES["second"]["config"], "fail_at": 4}
    failing["second"]["stop"] = {"training_iteration": 4}
    failing["second"]["checkpoint_config"] = {"checkpoint_frequency": 2}
    result = run(failing)
    assert result.exit_code == 1
    text = said(result.output)
    assert "second: ValueError: fail_at=4 must not be reached: a test wants it. Stop." in text
    assert 'tiny_trainables.py", line ' in text and "error.txt" in text
    assert "Traceback" not in text

    folder = tmp_path / "results" / "run"
    record = (folder / "first" / "stage.json").stat().st_mtime_ns
    resumed = run(failing, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "second goes on from iteration 2." in said(resumed.output)
    second = StageResult.load(folder / "second")
    assert second.metrics["objective/scores"] == 8.0
    # Of the third iteration, which the checkpoint of the second did not know, there is one row.
    assert [row["training_iteration"] for row in read_results(second.best_trial_folder)] == [
        1, 2, 3, 4,
    ]  # fmt: skip
    with (second.best_trial_folder / "progress.csv").open(encoding="utf-8") as lines:
        assert [row["training_iteration"] for row in csv.DictReader(lines)] == ["1", "2", "3", "4"]
    assert (folder / "first" / "stage.json").stat().st_mtime_ns == record  # not run again
    assert len(list(folder.glob("second/Counter_*"))) == 1  # the same trial


@pytest.mark.slow  # trials in processes of their own
def test_a_run_whose_state_a_full_disk_cut_short_is_not_resumed_in_a_traceback(run, tmp_path):
    failing = {"a": {**TWO_STAGES["first"], "config": {"fail_at": 2}}}
    failing["a"]["checkpoint_config"] = {"checkpoint_frequency": 1}
    assert run(failing).exit_code == 1
    stage = tmp_path / "results" / "run" / "a"
    for file in (*stage.glob("experiment_state-*.json"), stage / "tuner.pkl"):
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        result = run(failing, "--resume")
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
        text = said(result.output)
        assert "Tune's record of the run must be whole: a full disk may have cut it short" in text
        # Its checkpoints are no algorithm's.
        assert "Start anew." in text and "--resume" not in text
        file.write_bytes(whole)


@pytest.mark.slow
def test_resume_begins_a_stage_that_was_killed_before_tune_noted_anything(run, tmp_path):
    stage = tmp_path / "results" / "run" / "first"
    stage.mkdir(parents=True)
    result = run(TWO_STAGES, "--resume")
    assert result.exit_code == 0, result.output
    assert "first begins again: no checkpoint" in said(result.output)
    assert "second begins again" not in said(result.output)  # it had not begun
    assert StageResult.load(stage).metrics["training_iteration"] == 2


@pytest.mark.slow  # two runs
def test_a_stage_that_saved_nothing_begins_again_with_what_is_asked_for_now(run, tmp_path):
    wrong = {"a": {**TWO_STAGES["first"], "config": {"fail_at": 1}}}
    assert run(wrong).exit_code == 1
    corrected = {"a": {**TWO_STAGES["first"], "config": {"lr": 3.0}}}
    result = run(corrected, "--resume")
    assert result.exit_code == 0, result.output
    assert "a begins again: no checkpoint" in said(result.output)
    stage = StageResult.load(tmp_path / "results" / "run" / "a")
    assert stage.metrics["objective/scores"] == 6.0  # 2 iterations of lr = 3
    assert len(list(stage.folder.glob("Counter_*"))) == 1  # nothing of the one before is left
    kept = tmp_path / "results" / "run" / "replaced" / "a_1"
    assert f"Its files so far are in '{kept}'" in said(result.output)
    assert len(list(kept.glob("Counter_*/error.txt"))) == 1


@pytest.mark.slow  # two runs of two trials
def test_of_several_trials_those_that_saved_nothing_begin_again_and_are_named(run, tmp_path):
    search = {"a": {
        **TWO_STAGES["first"], "stop": {"training_iteration": 3},
        "config": {"fail_at": {"grid_search": [None, 2]}},
    }}  # fmt: skip
    assert run(search).exit_code == 1
    stage = tmp_path / "results" / "run" / "a"
    (failed,) = (file.parent for file in stage.glob("Counter_*/error.txt"))
    result = run(search, "--resume")
    assert result.exit_code == 1  # it fails again
    text = said(result.output)
    assert f"{failed.name} begins again: no checkpoint of it had been saved." in text
    kept = stage.parent / "replaced" / "a_1"
    assert f"Its files so far are in '{kept}'" in text
    assert [each.name for each in kept.iterdir()] == [failed.name]
    assert [len(read_results(each)) for each in (kept / failed.name, failed)] == [1, 1]
    assert len((failed / "samples.jsonl").read_text().splitlines()) == 1  # of this start alone


def test_restore_starts_from_a_checkpoint(run, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "count.json").write_text("7")
    result = run({"a": TWO_STAGES["first"]}, "--restore", str(checkpoint))
    assert result.exit_code == 0, result.output
    metrics = StageResult.load(tmp_path / "results" / "run" / "a").metrics
    # The count goes on from 7; iterations, and with them `stop`, are those of this run.
    assert (metrics["episode"], metrics["training_iteration"]) == (90, 2)


def test_a_name_is_used_once(run, tmp_path):
    assert run({"a": TWO_STAGES["first"]}).exit_code == 0
    before = sorted((tmp_path / "results").rglob("*"))
    result = run({"a": TWO_STAGES["first"]})
    assert result.exit_code == 2
    text = said(result.output)
    assert "experiment_name='run' must be new" in text and "--resume" in text
    assert sorted((tmp_path / "results").rglob("*")) == before


def test_a_failed_run_says_how_to_go_on_and_from_where(run, tmp_path, monkeypatch):
    command = ["train", "file", "my file.yaml", "--set", "lr=1"]
    monkeypatch.setattr(sys, "argv", ["/bin/rllib", *command])
    failing = {"a": {**TWO_STAGES["first"], "config": {"fail_at": 4}}}
    failing["a"]["stop"] = {"training_iteration": 9}
    failing["a"]["checkpoint_config"] = {"checkpoint_frequency": 1}
    text = said(run(failing).output)
    assert "This goes on from iteration 3 of a:" in text
    assert "rllib train file 'my file.yaml' --set lr=1 --resume" in text


def test_a_run_that_fails_before_anything_is_saved_is_not_resumed(run):
    failing = {"a": {**TWO_STAGES["first"], "config": {"fail_at": 1}}}
    text = said(run(failing).output)
    assert "Nothing was saved: once the cause is mended, start anew." in text
    assert "--resume" not in text


@pytest.mark.slow  # two runs
def test_a_run_that_is_resumed_goes_by_what_is_asked_for_now(run, tmp_path):
    failing = {"a": {**TWO_STAGES["first"], "config": {"fail_at": 5}}}
    failing["a"]["stop"] = {"training_iteration": 9}
    assert run(failing, "--checkpoint-freq", "1").exit_code == 1
    # Of two runs of this process that begin in one second Tune mixes the files of settings.
    found = (tmp_path / "results" / "run" / "a").glob("Counter_*/result.json")
    (trial,) = (file.parent for file in found)
    assert len(list(trial.glob("checkpoint_*/count.json"))) == 4

    resumed = ["--resume", "--checkpoint-freq", "3", "--keep-checkpoints-num", "2"]
    result = run(failing, *resumed, "--stop", "{training_iteration: 7}")
    assert result.exit_code == 0, result.output
    stage = StageResult.load(tmp_path / "results" / "run" / "a")
    assert stage.metrics["training_iteration"] == 7
    assert [path.parent.name for path in sorted(trial.glob("checkpoint_*/count.json"))] == [
        "checkpoint_000004", "checkpoint_000005",  # of iterations 6 and 7
    ]  # fmt: skip

    # A stage that has ended goes on where more is asked for, and not where less is.
    for limit, done in ((10, 10), (3, 10)):
        result = run(failing, *resumed, "--stop", f"{{training_iteration: {limit}}}")
        assert result.exit_code == 0, result.output
        stage = StageResult.load(tmp_path / "results" / "run" / "a")
        assert stage.metrics["training_iteration"] == done
        assert stage.metrics["iterations_since_restore"] == 3


@pytest.mark.slow  # a run
def test_a_run_that_is_past_a_lower_stop_ends_without_another_iteration(run, tmp_path):
    failing = {"a": {**TWO_STAGES["first"], "config": {"fail_at": 5, "model": "org/base"}}}
    failing["a"]["stop"] = {"training_iteration": 9}
    assert run(failing, "--checkpoint-freq", "2").exit_code == 1
    result = run(failing, "--resume", "--stop", "{training_iteration: 3}")
    assert result.exit_code == 0, result.output
    assert "a is at its stop already, at iteration 4." in said(result.output)
    stage = StageResult.load(tmp_path / "results" / "run" / "a")
    assert stage.metrics["training_iteration"] == 4 and stage.stop == {"training_iteration": 3}
    assert (stage.model / "config.json").is_file()
    assert [row["training_iteration"] for row in read_results(stage.best_trial_folder)] == [
        1, 2, 3, 4,
    ]  # fmt: skip


def test_a_run_that_still_runs_is_not_resumed_beside_itself(run, tmp_path):
    """Two would write the same checkpoints."""
    folder = tmp_path / "results" / "run"
    folder.mkdir(parents=True)
    (folder / RUN_RECORD).write_text("{}")
    with alone_in(folder):
        result = run(TWO_STAGES, "--resume")
    assert result.exit_code == 2 and "must name a run that has ended" in said(result.output)
    assert (folder / RUN_RECORD).read_text() == "{}", "it is the other's"


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals go to that thread"
)
@pytest.mark.slow  # a run that is stopped
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_saves_first(run, tmp_path, number):
    endless = {"a": {**TWO_STAGES["first"], "config": {"seconds": 0.2}}}
    endless["a"]["stop"] = {"training_iteration": 10_000}

    def stop_after_two_results():
        while not any(
            len(read_results(trial)) > 1 for trial in tmp_path.glob("results/run/a/Counter_*")
        ):
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    stopper = threading.Thread(target=stop_after_two_results, daemon=True)
    stopper.start()
    result = run(endless)
    stopper.join()
    assert result.exit_code == 130, result.output
    text = said(result.output)
    assert "stopped" in text and "--resume" in text
    (trial,) = tmp_path.glob("results/run/a/Counter_*")
    (saved,) = trial.glob("checkpoint_*")
    count = json.loads((saved / "count.json").read_text())
    assert f"It goes on from iteration {count}" in text
    assert read_results(trial)[-1]["training_iteration"] == count > 1

    result = run(endless, "--resume", "--stop", f"{{training_iteration: {count + 1}}}")
    assert result.exit_code == 0, result.output
    metrics = StageResult.load(tmp_path / "results" / "run" / "a").metrics
    assert metrics["training_iteration"] == count + 1
    assert metrics["iterations_since_restore"] == 1


@pytest.mark.slow  # a run in a process of its own
def test_a_signal_that_ends_ray_as_well_ends_the_run_at_once(tmp_path):
    """As batch systems send it; Ray's end took the command along after a minute, without a word."""
    command = [
        sys.executable, "-m", "rllib_llm.cli.main", "train", "--algo", COUNTER,
        "--config", "{seconds: 0.5}", "--stop", "{training_iteration: 10000}",
        "--checkpoint-freq", "1", "--storage-path", str(tmp_path), "--experiment-name", "run",
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        while not any(tmp_path.glob("run/counter/*/checkpoint_*")):
            assert process.poll() is None
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate()
    assert process.returncode == 130, output
    assert "--experiment-name run" in output and "--resume" in output


class LeavesNoModel(Counter):
    """Its checkpoints hold the count alone."""

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "count.json").write_text(str(self.count))


@pytest.mark.slow  # a run
def test_a_mistake_that_shows_between_two_stages_is_told_with_the_way_to_go_on(run):
    stages = {
        "a": {"run": f"{__name__}.LeavesNoModel", "stop": {"training_iteration": 1}},
        "b": {"run": COUNTER, "config": {"model": "${a.model}"}},
    }
    result = run(stages)
    assert result.exit_code == 1, result.output
    text = said(result.output)
    assert "its algorithm leaves no model" in text and "--resume" in text


class StopsAtTheStart(Counter):
    """Gets SIGTERM in the command's process once the run's folder, its `model`, is there."""

    @classmethod
    def default_resource_request(cls, config):
        if isinstance(config, dict) and Path(config["model"]).exists():
            sys.exit(signal.SIGTERM)  # what Ray's handler does
        return super().default_resource_request(config)


def test_a_run_that_is_stopped_before_its_first_iteration_says_how_to_go_on(run, tmp_path):
    stage = {**TWO_STAGES["first"], "run": f"{__name__}.StopsAtTheStart"}
    stage["config"] = {"model": str(tmp_path / "results" / "run")}
    for words in ([], ["--resume"]):
        result = run({"a": stage}, *words)
        assert result.exit_code == 130, result.output
        text = said(result.output)
        assert "Stopped while no trial was running. Nothing was saved yet." in text
        assert "--resume" in text


class ExitsAtTheStart(Counter):
    """Ends the command's process with a code of its own."""

    @classmethod
    def default_resource_request(cls, config):
        if isinstance(config, dict) and Path(config["model"]).exists():
            sys.exit(3)
        return super().default_resource_request(config)


def test_an_exit_of_the_user_s_code_keeps_its_code(run, tmp_path):
    stage = {**TWO_STAGES["first"], "run": f"{__name__}.ExitsAtTheStart"}
    stage["config"] = {"model": str(tmp_path / "results" / "run")}
    result = run({"a": stage})
    assert result.exit_code == 3 and "Stopped" not in result.output


def test_checkpoints_by_time_keep_two_and_the_best(run, tmp_path):
    timed = {"a": {**TWO_STAGES["first"], "stop": {"training_iteration": 5}}}
    timed["a"]["config"] = {"stale": 0}
    result = run(timed, "--checkpoint-interval-s", "0")
    assert result.exit_code == 0, result.output
    (trial,) = tmp_path.glob("results/run/a/Counter_*")
    counts = [json.loads(file.read_text()) for file in sorted(trial.glob("checkpoint_*/*.json"))]
    assert counts == [4, 5]
    assert json.loads((trial / "best_checkpoint" / "count.json").read_text()) == 5


def test_a_file_needs_no_word_before_it(tmp_path):
    for words in (["train", "none.yaml"], ["train", "file", "none.yaml"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        assert "file='none.yaml' must be a YAML file: there is none" in said(result.output)


def test_the_version_is_told():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith(f"rllib-llm {rllib_llm.__version__}, ray 2.")


def test_the_command_that_resumes_names_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["rllib", "train", "file", "x.yaml", "-v"])
    command = resume_command(tmp_path / "run", RunOptions())
    assert command == "rllib train file x.yaml -v --experiment-name run --resume"


@pytest.mark.slow  # a whole run
def test_options_may_stand_before_the_file(tmp_path, ray_session):
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({"a": TWO_STAGES["first"]}), encoding="utf-8")
    storage = ["--storage-path", str(tmp_path / "results"), "-n", "run"]
    arguments = ["train", "--num-samples", "2", *storage, "file", str(file), "--set", "lr=2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    stage = StageResult.load(tmp_path / "results" / "run" / "a")
    assert len(stage.trial_folders) == 2 and stage.metrics["objective/scores"] == 4.0


def test_options_on_both_sides():
    before = RunOptions(num_samples=4, stop="{a: 1}", overrides=["x=1"])
    options = laid_over(RunOptions(stop="{a: 2}", overrides=["y=1"], resume=True), before)
    assert options == RunOptions(
        num_samples=4, stop="{a: 2}", overrides=["x=1", "y=1"], resume=True
    )


@pytest.mark.slow  # two runs
def test_a_checkpoint_at_its_end_is_not_gone_on_from(tmp_path, ray_session):
    with tiny.built(tiny.sft()) as algorithm:
        tiny.train(algorithm, 2)
        checkpoint = algorithm.save_to_path(str(tmp_path / "checkpoint"))
    config = {"model": tiny.MODEL, "data": f"{tiny.HERE}.build_texts", "lr": 1e-3,
              "train_batch_size_per_learner": 6}  # fmt: skip
    arguments = ["train", "--algo", "SFT", "--config", json.dumps(config), "--storage-path",
                 str(tmp_path), "-n", "run", "--restore", checkpoint]  # fmt: skip
    result = CliRunner().invoke(app, [*arguments, "--stop", "{training_iteration: 2}"])
    assert result.exit_code == 2
    text = said(result.output)
    assert "stop.training_iteration=2 must be above 2, where sft.restore=" in text
    assert "iterations count on from a checkpoint. Raise it to the total." in text

    result = CliRunner().invoke(app, [*arguments, "--stop", "{training_iteration: 3}"])
    assert result.exit_code == 0, result.output
    metrics = StageResult.load(tmp_path / "run" / "sft").metrics
    assert (metrics["training_iteration"], metrics["episode"]) == (3, 18)


def test_a_full_disk_is_told_in_plain_words(run):
    full = {"a": {**TWO_STAGES["first"], "config": {"full_disk": True}}}
    result = run(full)
    assert result.exit_code == 1
    text = said(result.output)
    assert "No space left on device" in text and "--keep-checkpoints-num" in text


def test_options_lie_over_the_file(run, tmp_path):
    one = {"a": TWO_STAGES["first"]}
    result = run(
        one, "--stop", '{"training_iteration": 4}', "--checkpoint-freq", "1",
        "--keep-checkpoints-num", "2", "--set", "lr=0.5",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    stage = StageResult.load(tmp_path / "results" / "run" / "a")
    assert (stage.metrics["training_iteration"], stage.metrics["objective/scores"]) == (4, 2.0)
    assert len(list(stage.best_trial_folder.glob("checkpoint_*"))) == 2


def test_a_trial_that_needs_too_much_is_refused(run):
    result = run({"a": {**TWO_STAGES["first"], "config": {"num_cpus": 1000}}})
    assert result.exit_code == 2
    assert "one trial reserves 1000 CPUs and must fit" in said(result.output)


@pytest.mark.slow  # a trial in a process of its own
def test_algorithms_of_rllib_run_from_the_command_line(tmp_path, ray_session):
    config = {
        "num_env_runners": 0,
        "train_batch_size_per_learner": 64,
        "minibatch_size": 32,
        "num_epochs": 1,
        "model": {"fcnet_hiddens": [8]},
    }
    arguments = ["train", "--algo", "PPO", "--env", "CartPole-v1", "--config", json.dumps(config)]
    result = CliRunner().invoke(
        app, [*arguments, "--stop", "{training_iteration: 1}", "--storage-path", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    assert "env steps" in said(result.output)
    (run,) = tmp_path.glob("default_*")
    stage = StageResult.load(run / "ppo")
    assert stage.checkpoint.is_dir() and stage.model is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "file", "absent.yaml"], "must be a YAML file: there is none"),
        (["train"], "--algo=None must name an algorithm"),
        (["train", "--algo", "PPOO"], "Did you mean 'PPO'"),
        (["train", "--algo", "PPO", "--config", "[1]"], "--config='[1]' must be a mapping"),
        (["train", "--algo", COUNTER, "--config", "{lrr: 1}"], "lrr must be a known key"),
        (
            ["train", "--algo", "tests.runs.tiny_trainables:Counter", "--config", "{lrr: 1}"],
            "lrr must be a known key",
        ),
        (["train", "--algo", COUNTER, "--restore", "/nowhere"], "must be a checkpoint folder"),
        (["train", "--algo", COUNTER, "--stop", "{a: many}"], "stop.a='many' must be a number"),
        (["train", "--algo", COUNTER, "--num-samples", "0"], "Invalid value for '--num-samples'"),
        (["train", "--algo", COUNTER, "--set", "trackers=[wandbb]"], "Did you mean 'wandb'?"),
        (
            ["train", "--algo", COUNTER, "--resume", "--storage-path", "/nowhere"],
            "a run 'default' of the command line must lie in '/nowhere'",
        ),
        (["train", "--algo", COUNTER, "file", "x.yaml"], "must be left out with a file"),
        (["train", "--algo", COUNTER, "--storage-path", __file__], "must be a folder"),
        (["train", "--algo", COUNTER, "--storage-path", "/proc/x"], "that can be written to"),
        (
            ["train", "--algo", COUNTER, "--storage-path", "nothing://bucket"],
            "'nothing://bucket' must be a path or a URL that pyarrow knows",
        ),
    ],
)
def test_mistakes_are_one_panel_and_exit_code_2(arguments: list[str], message: str):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    text = said(result.output)
    assert message in text
    assert "Traceback" not in text


def test_warnings_are_shown_in_a_line_before_the_run():
    config = {
        "model": "rllib_llm.examples.arithmetic.build_model",
        "data": "rllib_llm.examples.arithmetic.sft_texts",
        "lr_num_updates": 7,
    }
    arguments = ["--config", json.dumps(config), "--storage-path", "nothing://bucket"]
    result = CliRunner().invoke(app, ["train", "--algo", "SFT", *arguments])
    assert result.exit_code == 2
    told = "warning: sft.config.lr_num_updates=7 has no effect with lr_schedule"
    assert told in said(result.output)
