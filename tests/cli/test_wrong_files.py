"""Files and folders that a command cannot use: a sentence that names them, and no traceback."""

from __future__ import annotations

import errno

import pytest
import typer
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.cli.session import user_errors
from rllib_llm.runs.yaml_loader import read
from rllib_llm.shared.errors import Problems
from tests.cli.said import said
from tests.runs.tiny_trainables import COUNTER


def test_a_file_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "weights.yaml"
    file.write_bytes(b"lr: \xff")
    with pytest.raises(Problems, match="weights.yaml' must be text in UTF-8: byte 4 is 0xff"):
        read(file)


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (["example", "get", "arithmetic_grpo", "--out", "no/such/x.yaml"], "no/such/x.yaml"),
        (["serve", "folder", "--set", "name=a: b: c"], "--set name: 'a: b: c' must have one value"),
        (["train", "--algo", "GRPO", "--stop", "3"], "--stop='3' must be a mapping: it is int"),
    ],
)
def test_what_a_command_cannot_use_is_named_in_a_sentence(command, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    done = CliRunner().invoke(app, [*command])
    assert isinstance(done.exception, SystemExit) and done.exit_code == 2
    assert answer in said(done.output)


TWO = """
sft: {run: SFT, stopp: {}, config: {model: a.b}}
grpo: {run: GRPO, config: {model: "${sft.model}", lr: -2}}
dpo: {run: DPO, num_samples: 0}
rm: {run: RewardModel, stop: {training_iteration: 1},
     config: {model: rllib_llm.examples.arithmetic.build_model, lr: -1, data: [text]}}
"""


@pytest.mark.parametrize("command", [["train", "file"], ["doctor", "--no-ray"]])
def test_mistakes_of_every_experiment_of_a_file_are_told_at_once(command, tmp_path):
    """What is wrong with grpo shows once sft, which it uses, can be read."""
    (tmp_path / "two.yaml").write_text(TWO)
    done = CliRunner().invoke(app, [*command, str(tmp_path / "two.yaml")])
    assert done.exit_code == 2
    told = said(done.output)
    assert "stopp must be a known key. Did you mean 'stop'?" in told
    assert "num_samples=0 must be" in told and "lr=-1 must be" in told
    assert "lr=-2" not in told


LONG = "a" * 300


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["train", "file", LONG], "too long"),
        (["doctor", LONG], "too long"),
        (["report", LONG], "too long"),
        (["generate", LONG], "too long"),
        (["evaluate", LONG], "too long"),
        (["rollouts", LONG], "too long"),
        (["example", "get", "arithmetic_grpo", "--out", LONG], "too long"),
        (["report", "listed"], "result.json must have an object"),
        (["report", "unknown"], "must"),
        (["train", "file", "two.yaml", "--resume", "-n", "listed", "--storage-path", "."], "must"),
        (["train", "--algo", "GRPO", "--ray-object-store-memory", "-1"], "object-store-memory"),
    ],
)
def test_names_and_records_that_cannot_be_are_no_traceback(command, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.yaml").write_text(TWO)
    (tmp_path / "listed" / "sft" / "trial").mkdir(parents=True)
    (tmp_path / "listed" / "sft" / "trial" / "result.json").write_text("[1, 2]\n")
    for name in ("listed", "unknown"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "run.json").write_text("[1, 2]\n")
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, SystemExit) and done.exit_code == 2
    assert told in done.output.replace("│", "").replace("\n", " ")


def test_a_full_disk_is_a_sentence(capsys):
    with pytest.raises(typer.Exit), user_errors():
        raise OSError(errno.ENOSPC, "No space left on device", "/results/out.jsonl")
    assert "No space left" in capsys.readouterr().err


def test_the_doctor_looks_where_the_file_stores_its_results(tmp_path):
    (tmp_path / "taken").write_text("")
    place = tmp_path / "taken" / "results"
    (tmp_path / "one.yaml").write_text(f"a: {{run: {COUNTER}, storage_path: {place}}}")
    done = CliRunner().invoke(app, ["doctor", "--no-ray", str(tmp_path / "one.yaml")])
    assert done.exit_code == 2
    told = "".join(said(done.output).split())  # paths are broken at the end of a line
    assert f"storage_path='{place}'mustbeafolder" in told
    free = tmp_path / "results"
    CliRunner().invoke(
        app, ["doctor", "--no-ray", str(tmp_path / "one.yaml"), "--storage-path", str(free)]
    )
    assert not free.exists()


def test_a_run_that_goes_on_needs_no_room_for_all_that_it_has_saved(tmp_path):
    """A full disk may be why it goes on, with fewer checkpoints to keep."""
    (tmp_path / "model").mkdir()
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:
        file.truncate(2**42)  # 4 TiB of holes
    command = [
        "train", "--algo", COUNTER, "--config", f"{{model: {tmp_path / 'model'}}}",
        "--storage-path", str(tmp_path), "--keep-checkpoints-num", "1",
    ]  # fmt: skip
    assert "GiB free for the checkpoints" in said(CliRunner().invoke(app, command).output)
    assert "a run 'default' of the command" in said(
        CliRunner().invoke(app, [*command, "--resume"]).output
    )
