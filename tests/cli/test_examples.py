from __future__ import annotations

import pytest
from typer.testing import CliRunner

from rllib_llm.cli.examples import description, example_files, find_example
from rllib_llm.cli.main import app
from rllib_llm.runs.yaml_loader import load, read
from tests.cli.said import said


def test_examples_are_listed_with_what_they_do():
    result = CliRunner().invoke(app, ["example", "list"])
    assert result.exit_code == 0
    text = said(result.output)
    for name, file in example_files().items():
        assert name in text
        assert description(file), f"{file} starts with no comment"


def test_the_list_can_be_filtered():
    result = CliRunner().invoke(app, ["example", "list", "--filter", "no such thing at all"])
    assert not [name for name in example_files() if name in result.output]


@pytest.mark.parametrize("name", example_files())
def test_every_example_is_printed_as_it_is_and_can_be_read(name: str):
    result = CliRunner().invoke(app, ["example", "get", name])
    file = find_example(name)
    assert result.stdout == file.read_text(encoding="utf-8")
    data = read(file)
    variables = [f"vars.{key}=x" for key, value in (data.get("vars") or {}).items() if not value]
    assert load(data, name, tuple(variables), file.parent)


def test_an_unknown_name_is_told_with_the_nearest():
    result = CliRunner().invoke(app, ["example", "run", "reviews_ppo_ptxx"])
    assert result.exit_code == 2
    assert "example='reviews_ppo_ptxx' must be an example" in said(result.output)


def test_the_description_is_the_first_sentence_of_the_comment(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("# Trains a thing\n# on data. More of it.\n\n# Later.\na: {run: SFT}\n")
    assert description(file) == "Trains a thing on data."
    file.write_text("# Dr. GRPO (Liu et al. 2025):\n# sums of 1.5 digits. More.\na: {run: SFT}\n")
    assert description(file) == "Dr. GRPO (Liu et al. 2025): sums of 1.5 digits."
    file.write_text("a: {run: SFT}\n")
    assert description(file) == ""


def test_get_does_not_overwrite(tmp_path):
    names = list(example_files())
    if not names:
        pytest.skip("no examples in this checkout")
    out = tmp_path / "mine.yaml"
    assert CliRunner().invoke(app, ["example", "get", names[0], "--out", str(out)]).exit_code == 0
    again = CliRunner().invoke(app, ["example", "get", names[0], "--out", str(out)])
    assert again.exit_code == 2 and "must be a new file" in said(again.output)
