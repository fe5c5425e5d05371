"""Experiments as small as they can be, sound in everything, and functions that are not."""

from __future__ import annotations

from typing import Any

from rllib_llm.envs.judges.rewards import Invalid
from rllib_llm.runs.doctor.machine_rules import GIB, Machine
from rllib_llm.runs.experiments import Experiment

HERE = "tests.runs.doctor.set_ups"
MODEL = "tests.algorithms.tiny_runs.build_model"
MACHINE = Machine(
    cpus=8, memory=64 * GIB, features=frozenset({"amx_bf16"}), shm_bytes=16 * GIB,
    disk_bytes=1024 * GIB,
)  # fmt: skip
SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
HELD_OUT = [{"prompt": f"{a}+9=", "answer": str(a + 9)} for a in range(5)]
TEXTS = [{"prompt": f"{a}-{b}=", "completion": str(a - b)} for a in range(5) for b in range(a)]
PAIRS = [{"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": "-"} for a in range(8)]


def right(completions, answer):
    """1 for the answer, else 0."""
    return [float(text == str(a)) for text, a in zip(completions, answer, strict=True)]


def raises(completions):
    raise RuntimeError("out of luck")


def leaves(completions):
    raise SystemExit(3)


class Unmade:
    """A judge whose folder is not there."""

    def __init__(self) -> None:
        raise OSError("no folder")


def infinite(completions):
    return [float("inf") for _ in completions]


def invalid(completions):
    return [Invalid("the grader's model is not loaded") for _ in completions]


def invalid_for_some(completions, answer):
    """Judges answers of one character alone."""
    pairs = zip(completions, answer, strict=True)
    return [float(text == a) if len(a) == 1 else Invalid("two characters") for text, a in pairs]


def nothing(completions):
    return None


def constant(completions):
    return [0.5 for _ in completions]


def has_keyword(completions):
    return [float("please" in text) for text in completions]


def one_number(completions):
    return [1.0]


def slow(completions):
    import time

    time.sleep(0.1)
    return [float(len(text)) for text in completions]


def grpo(stop: dict[str, Any] | None = None, env: dict[str, Any] | None = None, **config: Any):
    """A sound GRPO experiment with `config` laid over it; `env`: over its env_config."""
    given = {
        "prompts": SUMS,
        "eval_prompts": HELD_OUT,
        "reward_functions": f"{HERE}.right",
        "max_prompt_len": 8,
        **(env or {}),
    }
    settings = {
        "model": MODEL,
        "num_completions": 4,
        "train_batch_size_per_learner": 16,
        "minibatch_size": 8,
        "max_new_tokens": 5,
        "env_config": {key: value for key, value in given.items() if value is not None},
        **config,
    }
    return Experiment("run", "GRPO", "rllib_llm/RLHF-v0", settings, stop=_stop(stop))


def says_something(completions):
    """Of a conversation, which is a list of messages."""
    return [float(len(messages[-1]["content"])) for messages in completions]


def without_types(a, b):
    """A tool whose schema cannot be written."""


def add(a: int, b: int) -> int:
    """Returns the sum.

    Args:
        a: a number.
        b: another.
    """
    return a + b


def conversations(env: str, **env_config: Any):
    """A sound experiment of a policy that talks."""
    settings = {
        "model": "rllib_llm.examples.calculator.build_model",
        "num_completions": 4,
        "train_batch_size_per_learner": 16,
        "minibatch_size": 8,
        "max_new_tokens": 8,
        "env_config": env_config,
    }
    return Experiment("run", "GRPO", env, settings, stop=_stop(None))


def supervised(run: str, stop: dict[str, Any] | None = None, **config: Any):
    """A sound experiment of a supervised stage."""
    settings = {
        "model": MODEL,
        "data": TEXTS if run == "SFT" else PAIRS,
        "train_batch_size_per_learner": 4,
        "minibatch_size": 4,
        **config,
    }
    return Experiment("run", run, config=settings, stop=_stop(stop))


def _stop(stop: dict[str, Any] | None) -> dict[str, Any]:
    return {"training_iteration": 10} if stop is None else stop


class NeedsAService:
    """A tool that can be made where its service is, and nowhere else."""

    def __init__(self):
        raise KeyError("SERVICE")
