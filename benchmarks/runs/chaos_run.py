"""The training that `chaos.py` disturbs: every process notes what it does in its own ledger."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rllib_llm.algorithms.grpo import GRPO, GRPOConfig
from rllib_llm.examples import arithmetic
from rllib_llm.learners.policy_learners import GRPOLearner
from rllib_llm.rollouts.judged_batch import JudgedBatch
from rllib_llm.rollouts.source import RolloutSource
from rllib_llm.shared import columns

LEDGER = "CHAOS_LEDGER"  # environment variable: the folder of the ledgers
HERE = "benchmarks.runs.chaos_run"
WEIGHTS_NAME = "chaos"
NUM_PROMPTS, NUM_COMPLETIONS = 8, 3  # of one iteration, and of each prompt
PROMPTS = [{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)]
JUDGE_SECONDS = 0.025  # for each completion, so that a signal often finds samplers at work
LEARN_SECONDS = 0.3  # for a batch, so that groups which stream wait for their turn
STOP = "stop"  # file among the ledgers that ends the run
CHECKPOINT_EVERY = 4  # iterations
TOKENS = ("tokens_generated", "tokens_trained", "tokens_rejected", "tokens_carried")


def note(event: str, **what: Any) -> None:
    """Adds a line to this process's ledger; the system keeps it when the process is killed."""
    line = json.dumps({"event": event, "time": time.time(), "pid": os.getpid(), **what}) + "\n"
    path = os.path.join(os.environ[LEDGER], f"{os.getpid()}.jsonl")
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read_ledgers(folder: Path) -> list[dict[str, Any]]:
    """All events by time; a line that a kill cut short is left out."""
    events = []
    for path in folder.glob("*.jsonl"):
        events += [json.loads(line) for line in path.read_text().splitlines(True) if "\n" in line]
    return sorted(events, key=lambda event: event["time"])


def nap(seconds: float) -> None:
    """Sleeps, in the disturbed run."""
    ledger = os.environ.get(LEDGER)
    if ledger and not os.path.exists(os.path.join(ledger, STOP)):
        time.sleep(seconds)


class AccountedRollouts:
    """A source of batches that notes what it is asked for and what it gives."""

    def __init__(self, source: RolloutSource) -> None:
        self._source = source

    def next(self) -> JudgedBatch:
        note("handed_out", position=self._source.position, num_prompts=NUM_PROMPTS)
        batch = self._source.next()
        note("completed", rows=batch.columns[columns.ROW_ID].tolist())
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class AccountedGRPO(GRPO):
    """GRPO that notes which prompts it hands out and learns from."""

    @classmethod
    def get_default_config(cls) -> GRPOConfig:
        return GRPOConfig(algo_class=cls)

    def setup(self, config: Any) -> None:
        note("process", kind="driver")
        super().setup(config)
        note("ready")

    def make_rollouts(self) -> AccountedRollouts:
        return AccountedRollouts(super().make_rollouts())

    def step(self) -> dict[str, Any]:
        results = super().step()
        if self.config.streams and self.config.num_env_runners:
            note("process", kind="ledger", pid=self.rollouts.look()["pid"])
        if "rollouts" in results:
            told = results["rollouts"]
            reasons = [name for name in told if name.startswith("rejected/")]
            note("tokens", **{name: told[name] for name in (*TOKENS, *reasons)})
        note("iteration", version=self.weights_version, faults=results["faults"])
        return results

    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        super().restore_from_path(path, *args, **kwargs)
        note("restored", version=self.weights_version)


class AccountedLearner(GRPOLearner):
    """Notes the rows of every finished update."""

    def build(self) -> None:
        note("process", kind="learner")
        super().build()

    def prepare(self, batch: Any) -> Any:
        self._rows = batch[columns.ROW_ID].tolist()
        return super().prepare(batch)

    def update(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        nap(LEARN_SECONDS)
        results = super().update(*args, **kwargs)
        note("updated", version=self._weights_seq_no, rows=self._rows)
        return results


def build_model():
    return arithmetic.build_model(3, hidden_size=16, num_layers=1, num_heads=2, max_len=32)


def judge(completions: list[str]) -> list[float]:
    """Digits less other characters, after a while."""
    nap(JUDGE_SECONDS * len(completions))
    return [float(sum(1 if c.isdigit() else -1 for c in text)) for text in completions]


def note_sampler(*, env_runner: Any, **_: Any) -> None:
    if env_runner.worker_index:
        note("process", kind="evaluation" if env_runner.config.in_evaluation else "sampler")


def make_config(
    timeout_s: float | None,
    weights_name: str | None = None,
    streaming: Mapping[str, Any] = MappingProxyType({}),
    *,
    evaluates: bool = True,
) -> GRPOConfig:
    """Two samplers, one evaluation sampler where it `evaluates`, one learner; `timeout_s` of an
    answer, None: none. `streaming`: settings of that section."""
    config = (
        GRPOConfig(algo_class=AccountedGRPO)
        .language_model(model=f"{HERE}.build_model")
        .environment(
            "rllib_llm/RLHF-v0",
            env_config={"prompts": PROMPTS, "eval_prompts": PROMPTS[::9],
                        "reward_functions": f"{HERE}.judge", "max_prompt_len": 8},
        )
        .sampling(max_new_tokens=5, num_completions=NUM_COMPLETIONS, log_samples_every=0)
        .streaming(**streaming)
        .training(train_batch_size_per_learner=NUM_PROMPTS * NUM_COMPLETIONS, lr=1e-3,
                  minibatch_size=NUM_PROMPTS * NUM_COMPLETIONS // 2)
    )  # fmt: skip
    if streaming:
        config.training(off_policy="bypass")
    if evaluates:
        config.evaluation(
            evaluation_interval=2, evaluation_num_env_runners=1, evaluation_duration=6
        )
    return (
        config.env_runners(num_env_runners=2)
        .learners(num_learners=1, learner_class=AccountedLearner)
        .weights(weights_name=weights_name)
        .fault_tolerance(
            sampler_timeout_s=timeout_s,
            learner_timeout_s=timeout_s,
            setup_timeout_s=None if timeout_s is None else 15 * timeout_s,
        )
        .callbacks(on_environment_created=note_sampler)
    )
