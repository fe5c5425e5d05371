"""Checkpoints that are read in another folder than their run was started in."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rllib_llm.checkpoints.algorithm import found, in_its_folder
from rllib_llm.cli.main import app
from tests.algorithms import tiny_runs as tiny
from tests.cli.said import said


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The folder of a user, with data, a model and a reward function of its own."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    for name, rows in (("train", tiny.PAIRS), ("held_out", tiny.PAIRS[:4])):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    lines = "".join(json.dumps(row) + "\n" for row in tiny.PROMPTS)
    (folder / "prompts.jsonl").write_text(lines, encoding="utf-8")
    model, tokenizer = tiny.build_model()
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    source = "def brevity(completions):\n    return [-float(len(text)) for text in completions]\n"
    (folder / "my_own_rewards.py").write_text(source, encoding="utf-8")
    yield folder
    sys.modules.pop("my_own_rewards", None)


def save(config, folder):
    with tiny.built(config) as algorithm:
        algorithm.train()
        return algorithm.save_to_path(str(folder))


def evaluate(checkpoint, tmp_path, monkeypatch, *arguments):
    """The results of `rllib evaluate` in an empty folder."""
    (tmp_path / "elsewhere").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    sys.modules.pop("my_own_rewards", None)
    result = CliRunner().invoke(app, ["evaluate", str(checkpoint), "--out", "x.json", *arguments])
    assert result.exit_code == 0, said(result.output)
    return json.loads((tmp_path / "elsewhere" / "x.json").read_text(encoding="utf-8"))


@pytest.mark.usefixtures("ray_session")
def test_a_policy_finds_its_prompts_and_its_reward_function(project, tmp_path, monkeypatch):
    config = tiny.grpo().environment(
        env_config={"prompts": "prompts.jsonl", "reward_functions": "my_own_rewards.brevity"}
    )
    checkpoint = save(config.language_model(model="base"), tmp_path / "checkpoint")
    results = evaluate(checkpoint, tmp_path, monkeypatch, "--duration", "3")
    assert -5.0 <= results["scores"] <= 0.0


@pytest.mark.usefixtures("ray_session")
def test_a_reward_model_wants_held_out_rows_alone(project, tmp_path, monkeypatch):
    config = tiny.reward_model(data="train.jsonl", eval_data="held_out.jsonl")
    with tiny.built(config) as algorithm:
        algorithm.train()
        checkpoint = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        expected = algorithm.evaluate()
    (project / "train.jsonl").unlink()
    results = evaluate(checkpoint, tmp_path, monkeypatch)
    assert results["accuracy"] == expected["accuracy"]
    assert results["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.usefixtures("ray_session")
def test_a_fine_tuned_model_does_not_want_the_one_it_began_with(project, tmp_path, monkeypatch):
    texts = {"path": "tests.algorithms.tiny_runs.build_texts"}
    config = tiny.sft(data=texts, eval_data=texts).language_model(model="base")
    checkpoint = save(config, tmp_path / "checkpoint")
    shutil.rmtree(project / "base")
    results = evaluate(checkpoint, tmp_path, monkeypatch)
    assert 0.0 < results["loss"] < 10.0


def test_what_was_moved_with_the_run_is_taken_before_what_stayed(project, tmp_path, monkeypatch):
    config = in_its_folder(tiny.sft(data="train.jsonl", eval_data={"path": "held_out.jsonl"}))
    assert (config._started_in, config.data) == (str(project), "train.jsonl")
    (tmp_path / "moved").mkdir()
    shutil.copy(project / "train.jsonl", tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    config = in_its_folder(config)
    assert config.data == "train.jsonl"
    assert config.eval_data == {"path": str(project / "held_out.jsonl")}
    assert config._started_in == str(project)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("train.jsonl", "{}/train.jsonl"),
        ("*.jsonl", "{}/*.jsonl"),
        ("absent.jsonl", "absent.jsonl"),
        ("org/name", "org/name"),
        ("/absolute", "/absolute"),
        (["train.jsonl", "absent.jsonl"], ["{}/train.jsonl", "absent.jsonl"]),
        ({"model": "base", "quantization": "int8"}, {"model": "{}/base", "quantization": "int8"}),
        ([{"prompt": "base"}], [{"prompt": "base"}]),  # rows, not files
        (None, None),
    ],
)
def test_only_what_is_there_alone_becomes_absolute(
    project, tmp_path, monkeypatch, source, expected
):
    monkeypatch.chdir(tmp_path)
    filled = json.loads(json.dumps(expected).replace("{}", str(project)))
    assert found(source, Path(project)) == filled
