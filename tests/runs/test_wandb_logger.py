from __future__ import annotations

import json
import os
from pathlib import Path

import cloudpickle
import pytest
import yaml
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.runs.results import StageResult
from rllib_llm.runs.wandb_logger import WandbLogger, check_wandb
from rllib_llm.shared.errors import Problems
from tests.runs.tiny_trainables import COUNTER


@pytest.mark.slow  # W&B's own process
def test_wandb_works_offline_without_an_account_and_gets_the_texts(
    tmp_path, ray_session, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({"a": {"run": COUNTER, "stop": {"training_iteration": 2}}}))
    result = CliRunner().invoke(
        app,
        ["train", "file", str(file), "--storage-path", str(tmp_path), "--experiment-name", "run",
         "--wandb-project", "trial", "--wandb-run-name", "mine"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    trial = StageResult.load(tmp_path / "run" / "a").best_trial_folder
    (offline,) = trial.glob("wandb/offline-run-*")
    assert list(offline.glob("*.wandb"))
    assert texts_of(offline) >= {"Say", "number 1", "number 2"}

    result = CliRunner().invoke(
        app,
        ["train", "file", str(file), "--storage-path", str(tmp_path), "--experiment-name", "run",
         "--wandb-project", "trial", "--wandb-run-name", "mine", "--resume",
         "--stop", "{training_iteration: 3}"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    first, second = sorted(trial.glob("wandb/offline-run-*"))
    # W&B appends what is synced under an id that it knows to the run of that id.
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
    assert "number 3" in texts_of(second)


def texts_of(offline: Path) -> set[str]:
    """The texts in the tables of an offline run."""
    tables = sorted(offline.glob("files/media/table/samples_*.json"))
    rows = [row for table in tables for row in json.loads(table.read_text())["data"]]
    return {text for row in rows for text in row if isinstance(text, str)}


def test_without_key_login_or_offline_mode_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(Problems, match=r"WANDB_MODE=offline"):
        check_wandb(None)


def test_the_key_is_in_no_file_that_tune_writes(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    check_wandb("s3cret-key")
    assert os.environ["WANDB_API_KEY"] == "s3cret-key"  # where W&B's process gets it from
    # As Tune writes it into tuner.pkl.
    assert b"s3cret-key" not in cloudpickle.dumps(WandbLogger(project="project"))
