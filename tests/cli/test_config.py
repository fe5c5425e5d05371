"""`rllib config`: the whole table, for people and as JSON."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from rllib_llm.algorithms.registry import ALGORITHMS, get_algorithm_class
from rllib_llm.cli.main import app
from rllib_llm.config.sections import known_names
from tests.cli.said import said


def config(*arguments: str):
    return CliRunner().invoke(app, ["config", *arguments], env={"COLUMNS": "160"})


def test_settings_are_listed_by_section_with_the_algorithm_s_defaults():
    result = config("GRPO")
    assert result.exit_code == 0, result.output
    text = said(result.output)
    for section in ("sampling", "training", "prompts", "rewards", "reference", "weights"):
        assert f".{section}(...)" in text
    assert "num_completions 8 The number of completions per prompt [at least 1]" in text
    assert "kl_coeff 0.04 β, the weight of the KL to the reference, in nats" in text
    assert "TRL: beta." in text
    assert "vf_loss_coeff" not in text  # a critic's
    assert "rllib example get NAME -o FILE" in text and "--set NAME=VALUE" in text


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_json_has_every_setting_that_acts(algo: str):
    result = config(algo, "--json")
    rows = json.loads(result.output)
    config_class = type(get_algorithm_class(algo).get_default_config())
    flat = {row["flat"] for row in rows}
    assert len(flat) == len(rows)  # each in one section
    unused = {*config_class.ignored_settings, "lambda"}
    assert known_names(config_class) - unused <= flat
    assert all(row["meaning"] and row["default"] for row in rows)


def test_only_what_was_asked_for():
    rows = json.loads(config("PPOPtx", "--json", "--filter", "max_completion_length").output)
    assert [row["name"] for row in rows] == ["max_new_tokens"]


def test_algorithms_without_a_table_are_told():
    result = config("PPO")
    assert result.exit_code == 2
    assert "must be an algorithm of this package" in said(result.output)
    assert "PPOPtx" in said(config("PPOPtxx").output)


def test_an_algorithm_of_one_s_own_in_this_folder(tmp_path, monkeypatch):
    (tmp_path / "own_algorithm.py").write_text(
        "from rllib_llm.algorithms.grpo import GRPO, GRPOConfig\n"
        "class OwnConfig(GRPOConfig):\n"
        "    pass\n"
        "class Own(GRPO):\n"
        "    config_class = OwnConfig\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")  # which the command changes, as sys.path
    result = config("own_algorithm:Own", "--filter", "num_completions")
    assert result.exit_code == 0, result.output
    assert "num_completions 8" in said(result.output)
