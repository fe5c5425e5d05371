"""`rllib export` as a user calls it, the hub a stand-in."""

from __future__ import annotations

import shutil

import huggingface_hub
import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT
from rllib_llm.cli.main import app
from rllib_llm.runs.experiments import Experiment
from rllib_llm.runs.model_card import model_card
from tests.algorithms.tiny_runs import build_model
from tests.cli.said import said

CARD = model_card(
    Experiment(
        name="sums", run="GRPO", env="rllib_llm/Arithmetic-v0", stop={"training_iteration": 2},
        config={"model": "org/base-model", "prompts": {"data": "org/sums"}, "lr": 1e-4},
    ),
    {"episode": 64.0, "objective/scores": 0.25, "loss/policy_avg": 0.0}, "sums.yaml",
)  # fmt: skip


@pytest.fixture
def trial(tmp_path):
    model, tokenizer = build_model()
    folder = tmp_path / "run" / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    (folder / "class_and_ctor_args.pkl").write_bytes(b"RLlib's")
    return folder.parent


def export(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert result.exit_code == exit_code, result.output
    return said(result.output)


def test_a_card_has_the_hubs_metadata_results_and_settings():
    data = ModelCard(CARD).data
    assert (data.base_model, data.datasets) == ("org/base-model", ["org/sums"])
    assert data.library_name == "transformers" and "grpo" in data.tags
    assert "`objective/scores` | 0.250" in CARD and "rllib train file sums.yaml" in CARD
    settings = yaml.safe_load(CARD.partition("```yaml\n")[2].partition("```")[0])
    assert settings["config"]["lr"] == 1e-4 and settings["stop"] == {"training_iteration": 2}


def test_a_folder_is_a_model_of_transformers(trial, tmp_path):
    export(trial, "--to", tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() > 0
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert "README.md" in names and not any(name.endswith(".pkl") for name in names)
    assert "be new or empty" in export(trial, "--to", tmp_path / "out", exit_code=2)


def test_a_checkpoints_model_has_the_card_of_its_trial(trial, tmp_path):
    model = trial / "checkpoint_000000" / MODEL_IN_CHECKPOINT
    model.parent.mkdir(parents=True)
    shutil.copytree(trial / "model", model, ignore=shutil.ignore_patterns("README.md"))
    export(model, "--to", tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text(encoding="utf-8") == CARD


def test_the_hub_gets_the_folder(trial, monkeypatch):
    calls = []

    class Hub:
        def create_repo(self, name, **settings):
            calls.append((name, settings))
            return huggingface_hub.RepoUrl(f"https://huggingface.co/{name}")

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            calls.append((repo_id, sorted(file.name for file in folder_path.iterdir())))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert "https://huggingface.co/me/sums" in export(trial, "--to", "hub:me/sums", "--private")
    (created, settings), (uploaded, names) = calls
    assert (created, uploaded, settings["private"]) == ("me/sums", "me/sums", True)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {*names}


def test_a_hub_that_refuses_is_told(trial, monkeypatch):
    class Hub:
        def create_repo(self, name, **settings):
            raise huggingface_hub.errors.LocalTokenNotFoundError("Token is required")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    text = export(trial, "--to", "hub:me/sums", exit_code=2)
    assert "be a repository that you may write to" in text and "hf auth login" in text


def test_what_is_not_there_is_named(tmp_path):
    assert "it is not there" in export("org/nothing", "--to", tmp_path / "out", exit_code=2)
