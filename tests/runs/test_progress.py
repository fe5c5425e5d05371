"""What a Tuner in Python prints by default."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyarrow.fs import LocalFileSystem
from ray.tune.utils.log import Verbosity, has_verbosity, set_verbosity

from rllib_llm.algorithms.grpo import GRPO
from rllib_llm.runs.live_table import TunerProgress
from rllib_llm.shared import messages as quiet
from rllib_llm.shared.messages import VERBOSE
from tests.docs.code_blocks import blocks_of
from tests.runs.test_live_table import result, trial
from tests.runs.tiny_trainables import Counter

ROOT = Path(__file__).resolve().parents[2]


def ours(name: str, cls: type = GRPO, **params: object) -> SimpleNamespace:
    """A trial of one of our algorithms, or of another class."""
    return SimpleNamespace(
        **vars(trial(name, **params)), trainable_name=cls.__name__, get_trainable_cls=lambda: cls,
        storage=SimpleNamespace(
            experiment_fs_path="/runs/a", trial_fs_path="/none", trial_working_directory="/none",
            storage_filesystem=LocalFileSystem(),
        ),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _verbosity():
    """As Tune sets it for a `RunConfig` that says nothing."""
    set_verbosity(Verbosity.V3_TRIAL_DETAILS)
    yield
    set_verbosity(Verbosity.V3_TRIAL_DETAILS)


def test_lines_take_the_place_of_tune_s_tables(capsys):
    callback = TunerProgress()
    callback.setup(stop={"training_iteration": 2}, num_samples=1, total_num_samples=2)
    callback.on_step_begin(0, [])  # Tune knows of no trial yet
    one = ours("a", lr=0.1)
    callback.on_trial_start(0, [one], one)
    assert not has_verbosity(Verbosity.V1_EXPERIMENT)  # Tune is silent from here on
    callback.on_trial_result(one, result(1, objective={"scores": 1.5}))
    callback.on_trial_complete(one)
    callback.on_experiment_end([one])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 trials of GRPO, results in /runs/a"
    assert lines[2] == "lr=0.1  iteration 1/2  episodes 10  reward 1.500  stopped"
    assert "1/2" in lines[-2] and "1.500" in lines[-2]  # of the table of all trials
    resumed = pickle.loads(pickle.dumps(callback))
    resumed.setup(stop={"training_iteration": 2})
    set_verbosity(Verbosity.V3_TRIAL_DETAILS)
    resumed.on_step_begin(0, [one])
    resumed.on_trial_complete(one)
    assert capsys.readouterr().out.endswith("stopped\n")


@pytest.mark.parametrize("verbosity", [0, 1, 2])
def test_who_says_how_much_tune_prints_gets_that(verbosity, capsys):
    set_verbosity(verbosity)
    callback, one = TunerProgress(), ours("a")
    callback.setup(total_num_samples=1)
    callback.on_trial_start(0, [one], one)
    callback.on_trial_complete(one)
    callback.on_experiment_end([one])
    assert capsys.readouterr().out == "" and has_verbosity(verbosity)


def test_trials_of_others_print_what_they_do(capsys, monkeypatch):
    callback, one = TunerProgress(), ours("a", Counter)
    callback.setup(total_num_samples=1)
    callback.on_trial_start(0, [one], one)
    assert capsys.readouterr().out == "" and has_verbosity(Verbosity.V3_TRIAL_DETAILS)
    monkeypatch.setenv(VERBOSE, "1")  # and ours as well, for who wants to see it all
    callback, one = TunerProgress(), ours("a")
    callback.on_trial_start(0, [one], one)
    assert has_verbosity(Verbosity.V3_TRIAL_DETAILS)


def test_settings_of_tune_that_the_user_made_are_kept(monkeypatch):
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "1")
    monkeypatch.setenv(quiet.TUNE_CALLBACKS, "mine.Callback")
    quiet.quiet_libraries()
    quiet.quiet_libraries()
    assert os.environ["RAY_AIR_NEW_OUTPUT"] == "1"
    assert os.environ[quiet.TUNE_CALLBACKS] == f"mine.Callback,{quiet.PROGRESS}"


@pytest.mark.slow
def test_two_tiny_trials_of_the_guide_s_script_print_few_lines(tmp_path):
    page = ROOT / "docs" / "guides" / "search.md"
    script = next(block for block in blocks_of(page) if block.title == "search.py")
    (tmp_path / "search.py").write_text(script.code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "search.py"], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
    )  # fmt: skip
    lines = done.stdout.splitlines() + done.stderr.splitlines()
    assert len(lines) <= 40, "\n".join(lines)
    assert sum(line.endswith("done") for line in lines) == 2
    folder = next(line for line in lines if line.startswith("2 trials of GRPO, results in "))
    assert Path(folder.rpartition(" ")[2]).is_dir()
