"""Files and folders that a command cannot use: a sentence that names them, and no traceback."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.runs.yaml_loader import read
from rllib_llm.shared.errors import UserError
from tests.cli.said import said


def test_a_file_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "weights.yaml"
    file.write_bytes(b"lr: \xff")
    with pytest.raises(UserError, match="weights.yaml' must be text in UTF-8: byte 4 is 0xff"):
        read(file)


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (["example", "get", "arithmetic_grpo", "--out", "no/such/x.yaml"], "no/such/x.yaml"),
        (["serve", "folder", "--set", "name=a: b: c"], "--set name: 'a: b: c' must have quotes"),
        (["train", "--algo", "GRPO", "--stop", "3"], "--stop='3' must be a mapping: it is int"),
    ],
)
def test_what_a_command_cannot_use_is_named_in_a_sentence(command, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    done = CliRunner().invoke(app, [*command])
    assert isinstance(done.exception, SystemExit) and done.exit_code == 2
    assert answer in said(done.output)
