from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from rllib_llm.algorithms.language_model import MODEL_IN_CHECKPOINT
from rllib_llm.checkpoints.folder import write_manifest
from rllib_llm.checkpoints.model_folder import find_model
from rllib_llm.cli.main import app
from rllib_llm.envs.toys import arithmetic
from tests.cli.said import said


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder that holds a small untrained model where a checkpoint does."""
    folder = tmp_path_factory.mktemp("trial") / "checkpoint_000000"
    model, tokenizer = arithmetic.build_model(0, hidden_size=16, num_layers=1, num_heads=2)
    for part in (model, tokenizer):
        part.save_pretrained(folder / MODEL_IN_CHECKPOINT)
    write_manifest(folder, {})
    return folder


def generate(*arguments: object, **kwargs: object):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], **kwargs)


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_a_file_of_prompts_gives_a_file_of_completions(checkpoint, tmp_path):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "deep" / "c.jsonl"
    prompts.write_text('{"prompt": "1+2="}\n{"prompt": "3+4="}\n', encoding="utf-8")
    result = generate(
        checkpoint, "--file", prompts, "--out", out, "--num-completions", 2,
        "--max-new-tokens", 5, "--seed", 3,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    made = rows(out.read_text(encoding="utf-8"))
    assert [row["prompt"] for row in made] == ["1+2=", "1+2=", "3+4=", "3+4="]
    assert all(1 <= row["num_tokens"] <= 5 for row in made)
    assert all(row["finished"] or row["num_tokens"] == 5 for row in made)
    assert f"4 completions in {out}" in said(result.output)


def test_the_seed_decides_what_is_sampled(checkpoint):
    def completions(*arguments: object) -> list[str]:
        result = generate(checkpoint, *arguments, input="1+2=\n3+4=\n")
        return [row["completion"] for row in rows(result.output)]

    first = completions("--seed", 1)
    assert len(first) == 2
    assert completions("--seed", 1) == first
    assert completions("--seed", 2) != first
    assert completions("--greedy") == completions("--temperature", 0)


def test_chat_without_a_template_is_refused(checkpoint):
    result = generate(checkpoint, "--chat", input="hello\n")
    assert result.exit_code == 2
    assert "the tokenizer has no chat template" in said(result.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/at/all"], "checkpoint='/nowhere/at/all' must be a folder: there is none"),
        (["--top-p", "2"], "top_p=2.0 must be above 0 and at most 1"),
        (["--file", "absent.jsonl"], "must be a file or folder that exists"),
    ],
)
def test_mistakes_are_told(checkpoint, arguments: list[str], message: str):
    if not arguments[0].startswith("/"):
        arguments = [str(checkpoint), *arguments]
    result = generate(*arguments)
    assert result.exit_code == 2
    assert message in said(result.output)


def test_the_model_is_found_in_checkpoint_trial_and_model_folders(checkpoint, tmp_path):
    model = str(checkpoint / MODEL_IN_CHECKPOINT)
    assert find_model(str(checkpoint)) == model
    assert find_model(str(checkpoint.parent)) == model
    unfinished = checkpoint.with_name("checkpoint_000001") / MODEL_IN_CHECKPOINT
    shutil.copytree(model, unfinished)  # all that a copy brought before it was killed
    assert find_model(str(checkpoint.parent)) == model
    with pytest.raises(ValueError, match="saving it was interrupted"):
        find_model(str(checkpoint.with_name("checkpoint_000001")))
    shutil.rmtree(checkpoint.with_name("checkpoint_000001"))
    assert find_model(model) == model
    assert find_model("org/name") == "org/name"
    with pytest.raises(ValueError, match="must hold a model: there is no config.json"):
        find_model(str(tmp_path))
