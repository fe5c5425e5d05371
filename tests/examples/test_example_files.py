"""Every example is valid, and every stage of it runs: made small, in this process, in order."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from rllib_llm.config.schema import allowed_keys
from rllib_llm.runs.experiments import Experiment, algorithm_class, fill
from rllib_llm.runs.plan import check_experiments
from rllib_llm.runs.results import export_model, flatten
from rllib_llm.runs.search_space import examples, search_space
from rllib_llm.runs.yaml_loader import examples_folder, load, read
from tests.algorithms.tiny_runs import build_config

FOLDER = examples_folder()
FILES = sorted(FOLDER.glob("*.yaml"))
# A stage made small, by the settings that its algorithm knows.
SMALL = {
    "minibatch_size": 4,
    "num_epochs": 1,
    "ptx_batch_size": 2,
    "batch_size": 8,
    "evaluation_duration": 8,
    "num_env_runners": 0,
    "num_learners": 0,
    "evaluation_num_env_runners": 0,
    "num_cpus_for_main_process": 1,
}
# Recipes: data of the hub is replaced by rows of the same columns, models by tiny ones.
MODEL = "tests.conversations.templates.build_chat_llama"
QUESTIONS = [{"question": f"What is {n}+1?", "answer": f"It is {n}+1=<<{n}+1={n + 1}>>{n + 1}.\n"
              f"#### {n + 1}"} for n in range(16)]  # fmt: skip
REVIEWS = [{"text": f"Film {n} is {word}.<br />I saw it", "label": int(word == "fine")}
           for n in range(16) for word in ("fine", "dull")]  # fmt: skip
PAIRS = [{"prompt": f"Say {n}.", "chosen": f"{n}.", "rejected": "No."} for n in range(16)]
RECIPES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "gsm8k_grpo": (QUESTIONS, {"vars.tokens": 8}),
    "sentiment_ppo_ptx": (REVIEWS, {"vars.tokens": 4, "vars.eos": "<|im_end|>"}),
    "chat_dpo": (PAIRS, {}),
    "tools_grpo": ([], {"vars.turn_tokens": 8}),
    "distill": (QUESTIONS, {"vars.tokens": 8, "vars.teacher": MODEL}),
    "cluster_grpo": (QUESTIONS, {"vars.tokens": 8, "engine": "torch", "engine_settings": None}),
}


def recipe_overrides(stem: str, folder: Path, model: str = MODEL) -> list[str]:
    """`--set` texts with which a recipe needs no hub and no GPU."""
    if stem not in RECIPES:
        return []
    rows, own = RECIPES[stem]
    sets = {"vars.gpus": 0, "vars.model": model, **own}
    if rows:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sets |= {"vars.train": str(folder / "rows.jsonl"), "vars.test": str(folder / "rows.jsonl")}
    return [f"{key}={json.dumps(value)}" for key, value in sets.items()]


def experiments_of(file: Path, folder: Path) -> list[Experiment]:
    """The experiments of the file; skips the test where a package is not there that cannot be
    beside the tests' own."""
    if file.stem.startswith("verifiers"):
        pytest.importorskip("verifiers", reason="verifiers pins openai below 3")
    return load(read(file), file.name, tuple(recipe_overrides(file.stem, folder)), FOLDER)


def small_settings(experiment: Experiment) -> dict[str, Any]:
    """One point of the experiment's search space, its batches cut down."""
    (settings,) = examples(search_space(experiment), limit=1)
    defaults = algorithm_class(experiment.run, experiment.name).get_default_config()
    known = allowed_keys(defaults)
    small = {key: value for key, value in SMALL.items() if key in known}
    if "train_batch_size_per_learner" in known:
        group = settings.get("num_completions", getattr(defaults, "num_completions", 1))
        small["train_batch_size_per_learner"] = max(8, 2 * group)
    if settings.get("evaluation_interval"):
        small["evaluation_interval"] = 1
    return {**settings, **small}


def run_small(experiment: Experiment, folder: Path) -> tuple[dict[str, float], dict[str, str]]:
    """The result of one iteration, and what the stage leaves for later ones."""
    algo_class = algorithm_class(experiment.run, experiment.name)
    settings = small_settings(experiment)
    config = build_config(algo_class, settings, experiment.name)
    is_rllib = hasattr(config, "build_algo")
    trainable = algo_class(config=config if is_rllib else settings)
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    try:
        result = flatten(trainable.train())
        trainable.save_checkpoint(str(checkpoint))
    finally:
        trainable.stop()
        rollouts = Path(trainable.logdir) / "rollouts"
        if rollouts.is_dir():
            shutil.move(rollouts, folder / "rollouts")
        shutil.rmtree(trainable.logdir, ignore_errors=True)
    model = export_model(checkpoint, folder)
    made = {"checkpoint": checkpoint, "model": model, "rollouts": folder / "rollouts"}
    return result, {name: str(path) for name, path in made.items()}


def test_there_are_examples():
    assert len(FILES) >= 8


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_example_is_valid_and_says_what_it_is(file, tmp_path):
    assert file.read_text(encoding="utf-8").startswith("# ")
    experiments = experiments_of(file, tmp_path)
    check_experiments(experiments)
    for experiment in experiments:  # of more held-out rows a run warns
        if isinstance(held_out := experiment.config.get("eval_data"), dict):
            judged = experiment.config.get("evaluation_duration", 256)
            assert held_out["kwargs"].get("n", 0) <= judged


@pytest.mark.slow  # forty models are built and trained
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_stage_runs(file, ray_session, tmp_path):
    products: dict[str, str] = {}
    for experiment in experiments_of(file, tmp_path):
        experiment = fill(experiment, lambda reference, where: products[reference])
        result, made = run_small(experiment, tmp_path / experiment.name)
        products.update({f"{experiment.name}.{key}": path for key, path in made.items()})
        assert result["training_iteration"] == 1
        losses = {key: value for key, value in result.items() if key.startswith("loss/")}
        assert all(math.isfinite(value) for value in losses.values()), losses
        # What the file waits for and is judged by must be among the results.
        assert result.keys() >= {*experiment.stop, *experiment.pass_criteria} - {"time_total_s"}
