"""All stages of the example `stories_sentiment`, very small: from a file to the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.runs.results import before_and_after, read_json_lines, read_results
from rllib_llm.runs.yaml_loader import examples_folder

YAML = examples_folder() / "stories_sentiment.yaml"
# 12 texts, 8 pairs, 2 iterations of 4 completions of 4 tokens.
SMALL = {
    "texts.stop.episode": 12,
    "texts.batch_size": 12,
    "texts.min_new_tokens": 24,
    "texts.max_new_tokens": 24,
    "texts.opening_tokens": 8,
    "texts.eval_fraction": 0.4,
    "judge.stop.episode": 8,
    "judge.train_batch_size_per_learner": 8,
    "judge.minibatch_size": 4,
    "judge.evaluation_duration": 4,
    "judge.evaluation_interval": 1,
    "stories.stop.training_iteration": 2,
    "stories.train_batch_size_per_learner": 4,
    "stories.minibatch_size": 2,
    "stories.min_new_tokens": 4,
    "stories.max_new_tokens": 4,
    "stories.ptx_batch_size": 2,
    "stories.evaluation_interval": 1,
    "stories.evaluation_duration": 6,
}


def run(tmp_path: Path, model: str, reviews: Path) -> Path:
    """The folder of a small run that ended well."""
    sets = {"vars.model": model, "vars.reviews": str(reviews), **SMALL}
    arguments = ["train", "file", str(YAML), "--storage-path", str(tmp_path), "-n", "run"]
    for key, value in sets.items():
        arguments += ["--set", f"{key}={value}"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return tmp_path / "run"


def check(folder: Path) -> None:
    """What the three stages left behind."""
    (texts,) = folder.glob("texts/*/checkpoint_*")
    train, held_out = (read_json_lines(texts / name) for name in ("train.jsonl", "eval.jsonl"))
    assert len(train) + len(held_out) == 12
    assert train and held_out
    judge = json.loads(next(folder.glob("judge/*/model/config.json")).read_text())
    assert judge["num_labels"] == 1 if "num_labels" in judge else len(judge["id2label"]) == 1
    assert judge["rllib_llm_score_std"] > 0

    trials = {
        json.loads((path / "params.json").read_text())["ptx_coeff"]: path
        for path in folder.glob("stories/*")
        if path.is_dir()
    }
    assert len(trials) == 2
    assert min(trials) == 0.0 < max(trials)
    results = {coeff: read_results(path) for coeff, path in trials.items()}
    for coeff, rows in results.items():
        assert len(rows) == 2
        # Measured in both trials, before training too, and on the same held-out texts.
        assert rows[-1]["eval/ptx_loss"] > 0 and rows[-1]["loss/ptx_avg"] > 0
        pairs = before_and_after(read_json_lines(trials[coeff] / "samples.jsonl"))
        assert pairs and all(before["iteration"] == 0 for before, _ in pairs)
    stage = json.loads((folder / "stories" / "stage.json").read_text())
    assert Path(folder, "stories", stage["model"], "config.json").is_file()


@pytest.mark.slow
def test_on_a_made_up_model(tmp_path):
    reviews = tmp_path / "reviews"
    reviews.mkdir()
    for name in ("train.jsonl", "dev.jsonl"):
        rows = [
            {"text": f"{word} {n} .", "label": word == "fine"}
            for n in range(8)
            for word in ("fine", "dull")
        ]
        (reviews / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    check(run(tmp_path, "tests.tiny_models.build_llama", reviews))


@pytest.mark.slow
def test_on_the_pretrained_model(tmp_path, shared_dir):
    model, reviews = shared_dir / "models" / "stories260K", shared_dir / "data" / "sst2"
    check(run(tmp_path, str(model), reviews))
