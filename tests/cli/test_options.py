from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rllib_llm.cli.main import app

# Ray 2.40's `rllib train file`, as far as it makes sense here; trackers are settings.
RAY_OPTIONS = [
    "--stop", "--checkpoint-freq", "--checkpoint-at-end", "--keep-checkpoints-num",
    "--checkpoint-score-attr", "--storage-path", "--restore", "--resume", "--num-samples",
    "--experiment-name", "--ray-address", "--ray-num-cpus", "--ray-num-gpus", "--scheduler",
    "--scheduler-config", "--ray-object-store-memory", "--set",
]  # fmt: skip


@pytest.mark.parametrize("command", [["train"], ["train", "file"], ["example", "run"]])
def test_the_known_options_are_there(command: list[str]):
    result = CliRunner().invoke(app, [*command, "--help"], terminal_width=200)
    assert result.exit_code == 0
    assert not [option for option in RAY_OPTIONS if option not in result.output]


def test_commands_of_the_console_script():
    result = subprocess.run(
        [sys.executable, "-m", "rllib_llm.cli.main", "--help"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    for command in ("train", "evaluate", "generate", "example", "env"):
        assert command in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("command", ["train", "doctor", "serve"])
def test_a_setting_without_an_equals_sign_is_said_and_not_the_word_behind_it(command: str):
    result = CliRunner().invoke(app, [command, "x.yaml", "--set", "lr", "1e-4"])
    assert result.exit_code == 2
    said = " ".join(result.output.replace("│", " ").split())
    assert "'lr' must be NAME=VALUE without spaces, such as lr=1e-4." in said
    assert "1e-4)" not in said
