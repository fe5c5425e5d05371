"""Writes docs/reference/mistakes.md: what newcomers get wrong, and what they are told.

    python scripts/mistakes.py

Every answer is made by the code, in this process: that of `rllib doctor FILE` for files, of the
exception for Python. No Ray is started and no model is loaded.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rllib_llm import GRPOConfig, PPOPtxConfig
from rllib_llm.runs.doctor.examine import examine
from rllib_llm.runs.doctor.machine_rules import GIB, Machine
from rllib_llm.runs.yaml_loader import load, parse

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "mistakes.md"
HEAD = """# Mistakes and their answers

What a newcomer may get wrong, and what `rllib doctor` (and `rllib train`, before it starts) or the
exception in Python says. `python scripts/mistakes.py` makes this page from the code.

| mistake | answer |
|---|---|
"""
MACHINE = Machine(
    cpus=8, memory=64 * GIB, features=frozenset({"amx_bf16"}), shm_bytes=16 * GIB,
    disk_bytes=1024 * GIB,
)  # fmt: skip
MODEL = "rllib_llm.examples.arithmetic.build_model"
BASE: dict[str, Any] = {
    "run": "GRPO",
    "env": "rllib_llm/RLHF-v0",
    "stop": {"training_iteration": 3},
    "config": {
        "model": MODEL,
        "prompts": {"data": "prompts.csv"},
        "rewards": {"functions": ["rllib_llm.examples.arithmetic.correct"]},
        "max_new_tokens": 4,
        "num_completions": 4,
        "train_batch_size_per_learner": 16,
        "minibatch_size": 16,
    },
}
REMOVED = object()
TRACEBACK = "Traceback:"


def file(**changes: Any) -> str:
    """The YAML of a sound experiment with changes by dotted name (`config__lr=...`)."""
    data = copy.deepcopy(BASE)
    for name, value in changes.items():
        *path, last = name.split("__")
        place = data
        for part in path:
            place = place.setdefault(part, {})
        if value is REMOVED:
            place.pop(last, None)
        else:
            place[last] = value
    return yaml.safe_dump({"my-run": data}, sort_keys=False)


def config(**settings: Any) -> str:
    return file(**{f"config__{name}": value for name, value in settings.items()})


FILES: dict[str, str] = {
    # --- the file --------------------------------------------------------------------------
    "no name above `run:`": yaml.safe_dump(BASE, sort_keys=False),
    "an empty file": "",
    "a tab in the YAML": "my-run:\n\trun: GRPO\n",
    "`runn: GRPO`": file(run=REMOVED, runn="GRPO"),
    "`run: grpo`": file(run="grpo"),
    "`run: PPOptx`": file(run="PPOptx"),
    "`run: PPO` (RLlib's) with a model": file(run="PPO"),
    "`confg:`": file(confg={"lr": 1}),
    "`stop: 3`": file(stop=3),
    "`stop: {timesteps_total: 1000}`": file(stop={"timesteps_total": 1000}),
    "`stop: {training_iterations: 3}`": file(stop={"training_iterations": 3}),
    "`checkpoint_freq: 1`": file(checkpoint_freq=1),
    "`num_samples: 0`": file(num_samples=0),
    "a name with a space": yaml.safe_dump({"my run": BASE}),
    "`model: ${sft.model}` without a stage `sft`": config(model="${sft.model}"),
    "`model: ${vars.m}` without `vars`": config(model="${vars.m}"),
    # --- model -----------------------------------------------------------------------------
    "no model": config(model=REMOVED),
    "a model folder that is not there": config(model="./my-model"),
    "a dotted path to nothing": config(model="rllib_llm.examples.arithmetic.build_modle"),
    "`max_prompt_len: 128` directly below `config`": config(max_prompt_len=128),
    "`max_new_tokens: 1000`": config(max_new_tokens=1000),
    "`mixed_precision: fp16`": config(mixed_precision="fp16"),
    "`lora: {rank: 8}`": config(lora={"rank": 8}),
    "`lora: {r: 0}`": config(lora={"r": 0}),
    "`lora: {target_modules: [q_prj]}`": config(lora={"target_modules": ["q_prj"]}),
    # --- settings --------------------------------------------------------------------------
    "`learning_rate: 1e-5`": config(learning_rate=1e-5),
    "`lr: fast`": config(lr="fast"),
    "`lr: lognormal(1e-6, 1e-4)`": config(lr="lognormal(1e-6, 1e-4)"),
    "`lr: -1`": config(lr=-1.0),
    "`lr: .inf`": config(lr=float("inf")),
    "`temperature: -1`": config(temperature=-1),
    "`temperature: hot`": config(temperature="hot"),
    "`top_p: 1.5`": config(top_p=1.5),
    "`num_generations: 8` (TRL's name)": config(num_generations=8),
    "`num_completions: 1` with GRPO": config(num_completions=1),
    "`num_completions: 3`, batch of 16": config(num_completions=3),
    "`minibatch_size: 0`": config(minibatch_size=0),
    "`minibatch_size: 5`, batch of 16": config(minibatch_size=5),
    "`beta: 0.1` (TRL's name)": config(beta=0.1),
    "`ref_kl_coeff: -0.1`": config(ref_kl_coeff=-0.1),
    "`num_epochs: 0`": config(num_epochs=0),
    "`grad_clip: 0`": config(grad_clip=0),
    "`adam_betas: [0.9, 1.5]`": config(adam_betas=[0.9, 1.5]),
    "warm-up longer than the run's decay": config(lr_num_updates=5, lr_num_warmup_updates=100),
    "`kl_estimator: k4`": config(kl_estimator="k4"),
    "`framework: tf2`": config(framework="tf2"),
    "`max_staleness: -1`": config(max_staleness=-1),
    "`schedule: fast`": config(schedule="fast"),
    "`engine: vlm`": config(engine="vlm"),
    "`num_env_runners: -1`": config(num_env_runners=-1),
    "`pass_at: [16]` of 4 completions": config(pass_at=[16]),
    "PPO's `ptx_coeff` with GRPO": config(ptx_coeff=0.1),
    "`stop: {training_iteration: 0}`": file(stop={"training_iteration": 0}),
    "`stop: {training_iteration: true}`": file(stop={"training_iteration": True}),
    "`mode: max` without a metric": file(mode="max"),
    "`num_to_keep: 0`": file(checkpoint_config={"num_to_keep": 0}),
    "`time_budget_s: 1h`": file(time_budget_s="1h"),
    "`run: PPO` (RLlib's) without an environment": yaml.safe_dump({"my-run": {"run": "PPO"}}),
    "`env: [RLHF-v0]`": file(env=["RLHF-v0"]),
    "`model: {path: ./my-model}`": config(model={"path": "./my-model"}),
    "`model: ${sft.model` (no closing brace)": config(model="${sft.model"),
    "`tokenizer: ./my-tokenizer`": config(tokenizer="./my-tokenizer"),
    "`max_new_tokens: $N` (a shell's)": config(max_new_tokens="$N"),
    # --- data ------------------------------------------------------------------------------
    "no prompts": config(prompts=REMOVED),
    "`data: prompt.csv` (misspelt)": config(prompts={"data": "prompt.csv"}),
    "`data: prompts.xlsx`": config(prompts={"data": "prompts.xlsx"}),
    "a column that is not there": config(prompts={"data": "prompts.csv", "prompt_column": "text"}),
    "`prompts: {dta: ...}`": config(prompts={"dta": "prompts.csv"}),
    "an empty file of prompts": config(prompts={"data": "empty.jsonl"}),
    "a broken line of JSON": config(prompts={"data": "broken.jsonl"}),
    "`eval_fraction: 1.5`": config(prompts={"data": "prompts.csv", "eval_fraction": 1.5}),
    "SFT without `data`": file(run="SFT", env=REMOVED, config={"model": MODEL}),
    "DPO on rows without `chosen`": file(
        run="DPO", env=REMOVED, config={"model": MODEL, "data": "prompts.csv"}
    ),
    # --- rewards and environments ----------------------------------------------------------
    "nothing judges": config(rewards=REMOVED),
    "a reward function that is not there": config(rewards={"functions": ["my_rewards.fun"]}),
    "a reward function without the module": config(rewards={"functions": ["correct"]}),
    "a reward function whose module does not run": config(
        rewards={"functions": ["broken_rewards.good"]}
    ),
    "a reward that wants a column which the data lacks": config(
        rewards={"functions": ["rllib_llm.examples.arithmetic.correct"]},
        prompts={"data": "no_answers.csv"},
    ),
    "weights for functions that do not exist": config(
        rewards={"functions": ["rllib_llm.examples.arithmetic.correct"], "weights": [1, 2]}
    ),
    "a reward model's folder that is not there": config(rewards={"model": {"model": "./rm"}}),
    "`env: RLHF-v0`": file(env="RLHF-v0"),
    "`env: rllib_llm/Arithmetic`": file(env="rllib_llm/Arithmetic"),
    "`env_config: {max_prompt_len: many}`": config(env_config={"max_prompt_len": "many"}),
    "`env_config: {promts: ...}`": config(env_config={"promts": "prompts.csv"}),
}
PYTHON: dict[str, Callable[[], Any]] = {
    "`GRPOConfig(learning_rate=1e-5)`": lambda: GRPOConfig(learning_rate=1e-5),
    "`GRPOConfig().training(learning_rate=1e-5)`": lambda: GRPOConfig().training(
        learning_rate=1e-5
    ),
    "`GRPOConfig().training(lr='fast')`": lambda: (
        GRPOConfig().language_model(model=MODEL).training(lr="fast").validate()
    ),
    "`GRPOConfig().sampling(temperature=-1)`": lambda: (
        GRPOConfig().language_model(model=MODEL).sampling(temperature=-1).validate()
    ),
    "`PPOPtxConfig().validate()` with nothing set": lambda: PPOPtxConfig().validate(),
}


def prepare(folder: Path) -> None:
    """Writes the files of data that the mistakes name."""
    sums = [(a, b) for a in range(5) for b in range(5)]
    rows = "".join(f"{a}+{b}=,{a + b}\n" for a, b in sums)
    (folder / "prompts.csv").write_text(f"prompt,answer\n{rows}", encoding="utf-8")
    prompts = "".join(f"{a}+{b}=\n" for a, b in sums)
    (folder / "no_answers.csv").write_text(f"prompt\n{prompts}", encoding="utf-8")
    code = "def good(completions:\n    return [1.0 for text in completions]\n"
    (folder / "broken_rewards.py").write_text(code, encoding="utf-8")
    (folder / "empty.jsonl").write_text("", encoding="utf-8")
    (folder / "broken.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": \n', encoding="utf-8")


def answer_to_file(text: str) -> str:
    """What the doctor says of a file: its errors, or, where there is none, its warnings."""
    try:
        problems, _ = examine(load(parse(text, "my.yaml"), "my.yaml"), MACHINE)
    except ValueError as error:
        return "<br>".join(str(error).splitlines())
    except Exception as error:  # noqa: BLE001  (a traceback to the user: the test finds it)
        return f"{TRACEBACK} {type(error).__name__}: {error}"
    errors = [str(problem) for problem in problems if problem.severity == "error"]
    told = [problem for problem in problems if problem.name.startswith("my-run")]
    return "<br>".join(errors or [f"{problem.severity}: {problem}" for problem in told])


def answer_to_python(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001  (in Python every answer is an exception)
        return f"`{type(error).__name__}`: {error}"
    return ""


def answers() -> dict[str, str]:
    """Every mistake with its answer, "" where nothing is said."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepare(Path(folder))
        os.chdir(folder)
        sys.path.insert(0, folder)
        try:
            found = {mistake: answer_to_file(text) for mistake, text in FILES.items()}
            found |= {mistake: answer_to_python(call) for mistake, call in PYTHON.items()}
        finally:
            os.chdir(before)
            sys.path.remove(folder)
    here = os.path.realpath(folder)
    return {mistake: text.replace(here, "/home/me").replace(folder, "/home/me")
            for mistake, text in found.items()}  # fmt: skip


def page(found: dict[str, str]) -> str:
    """The page of these answers."""

    def cell(text: str) -> str:
        return " ".join(text.replace("|", "\\|").split())

    rows = (f"| {cell(mistake)} | {cell(answer)} |\n" for mistake, answer in found.items())
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(answers()), encoding="utf-8")
