"""A run whose storage is a URL: stages hand over, it is resumed, restored and looked at."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.data.rollouts import open_rollouts, query, rollout_folders
from rllib_llm.runs.results import StageResult
from rllib_llm.shared.storage import CACHE, UrlPath
from tests.cli.said import said
from tests.s3_server import bucket

FILE = """
sft:
  run: SFT
  stop: {training_iteration: 2}
  config:
    model: rllib_llm.examples.arithmetic.build_model
    data: rllib_llm.examples.arithmetic.sft_texts
    train_batch_size_per_learner: 16
    max_length: 16
grpo:
  run: GRPO
  env: rllib_llm/Arithmetic-v0
  stop: {training_iteration: STOP}
  config:
    model: ${sft.model}
    max_new_tokens: 4
    train_batch_size_per_learner: 16
    num_completions: 8
    evaluation_interval: 1
    evaluation_duration: 8
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    with bucket() as url:
        yield UrlPath(url) / "runs"


def rllib(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return said(result.output)


def rows_kept(run: UrlPath) -> list[tuple[int, str, int]]:
    rows = query(open_rollouts(rollout_folders(run))).to_pylist()
    return [(row["iteration"], row["status"], row["position"]) for row in rows]


@pytest.mark.slow
def test_a_run_at_a_url(root, tmp_path, ray_session):
    file = tmp_path / "two.yaml"
    options = ("--storage-path", root, "--experiment-name", "one")
    file.write_text(FILE.replace("STOP", "1"))
    text = rllib("train", "file", file, *options)
    assert "grpo" in text
    run = root / "one"
    stage = StageResult.load(run / "grpo")
    assert (stage.model / "config.json").is_file() and (run / "grpo" / "stage.json").is_file()
    assert (stage.best_trial_folder / "result.json").is_file()
    page = (run / "grpo" / "report.html").read_text()
    assert '"torch":' in page and '"tokens":[["' in page
    first = rows_kept(run)
    # Sixteen completions of two prompts, and eight held-out ones before and after.
    assert sorted({row[:2] for row in first}) == [
        (0, "evaluated"),
        (1, "evaluated"),
        (1, "trained"),
    ]

    file.write_text(FILE.replace("STOP", "2"))
    rllib("train", "file", file, *options, "--resume")
    results = (stage.best_trial_folder / "result.json").read_text().splitlines()
    assert [json.loads(line)["training_iteration"] for line in results] == [1, 2]
    second = rows_kept(run)
    assert second[: len(first)] == first  # none lost, none twice
    assert {row[:2] for row in second[len(first) :]} == {(2, "trained"), (2, "evaluated")}

    restored = FILE.replace("STOP", "3").partition("grpo:")[2]
    file.write_text("grpo:" + restored.replace("${sft.model}", f'"{stage.model}"'))
    text = rllib(
        "train", "file", file, "--storage-path", tmp_path, "--experiment-name", "two",
        "--restore", run / "grpo",
    )  # fmt: skip
    assert StageResult.load(tmp_path / "two" / "grpo").metrics["training_iteration"] == 3
    assert "completions" in rllib("rollouts", run, "--show", "1")
