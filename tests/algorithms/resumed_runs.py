"""Runs that test_exact_resumption.py saves in one process and goes on with in another.

    python -m tests.algorithms.resumed_runs FOLDER

restores FOLDER/<name>/checkpoint of every run, trains on, and writes what came of it beside it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from rllib_llm.rollouts.recorder import SAMPLES_FILE
from tests.algorithms import tiny_runs as tiny

NUM_BEFORE = NUM_AFTER = 5  # iterations
GATE = "RLLIB_LLM_TEST_GATE"  # environment variable: judging stops for ever after so many calls
DECAY = {"lr_schedule": "linear", "lr_num_updates": 60, "lr_num_warmup_updates": 3}
# Of a result, what may differ: times, where it ran, and what this process has written.
TIMES = {"throughput", "timers", "eps", "date", "timestamp", "pid", "hostname", "node_ip", "config",
         "trial_id", "fault_tolerance", "env_runner_group", "perf", "time_this_iter_s",
         "time_total_s", "time_since_restore", "iterations_since_restore", "warmup_time",
         "num_training_step_calls_per_iteration", "time_share", "done", "checkpoint_dir_name",
         "tokens_per_s", "rollout_store"}  # fmt: skip
_num_calls = 0


def gated_digits(completions: list[str]) -> list[float]:
    """`tiny.num_digits`, which does not return from its $GATE-th call in a process."""
    global _num_calls
    _num_calls += 1
    while _num_calls > int(os.environ.get(GATE, sys.maxsize)):
        time.sleep(0.1)
    return tiny.num_digits(completions)


def ppo():
    """10 of 6 prompts an iteration, 5 of 16 texts an update: epochs end inside iterations."""
    config = tiny.ppo(
        train_batch_size_per_learner=10, minibatch_size=5, ref_kl_target=2.0, ref_kl_horizon=50.0,
        scale_scores=True, ptx_coeff=0.1, ptx_data=tiny.TEXTS, ptx_batch_size=5, **DECAY,
    ).sampling(log_samples_every=1, num_logged_samples=10)  # fmt: skip
    return config.evaluation(evaluation_interval=2, evaluation_duration=6)


def exact_ppo():
    """The same with any number of samplers: one in the learner's process gives its values, which
    differ in their last bit from those that the learner computes."""
    return ppo().training(off_policy="decoupled", off_policy_weights=None)


def grpo():
    """4 of 6 prompts an iteration."""
    return tiny.grpo(**DECAY).sampling(log_samples_every=1, num_logged_samples=12)


def lagging():
    """Samplers have the weights of every third update: saved after five, those of the third."""
    return grpo().training(off_policy="decoupled").weights(publish_every=3)


def streamed_lagging():
    return two_samplers(lagging()).streaming(max_staleness=1)


def sft():
    """6 of 16 texts an iteration."""
    return tiny.sft(num_epochs=2, minibatch_size=3, eval_data=tiny.TEXTS[:5], **DECAY)


def adapters():
    """Dropout, the only thing here that draws from a random state."""
    config = tiny.sft(minibatch_size=3)
    return config.language_model(lora={"r": 2, "dropout": 0.5})


def reward_model():
    """5 of 8 pairs an iteration; it evaluates by itself when it is saved."""
    config = tiny.reward_model(
        minibatch_size=2, train_batch_size_per_learner=5, eval_data=tiny.PAIRS, **DECAY
    )
    return config.evaluation(evaluation_interval=4)


def two_samplers(config):
    return config.env_runners(num_env_runners=2)


# Run -> its configs before and after the checkpoint.
RUNS: dict[str, tuple[Callable, Callable]] = {
    "ppo": (ppo, ppo),
    "exact ppo, two samplers": (
        lambda: two_samplers(exact_ppo()),
        lambda: two_samplers(exact_ppo()),
    ),
    "grpo": (grpo, grpo),
    "grpo, then two samplers": (grpo, lambda: two_samplers(grpo())),
    "lagging": (lagging, lagging),
    "lagging ahead": (streamed_lagging, streamed_lagging),
    "sft": (sft, sft),
    "adapters": (adapters, adapters),
    "reward model": (reward_model, reward_model),
}
UNINTERRUPTED = {
    "ppo": ppo, "exact ppo, two samplers": lambda: two_samplers(exact_ppo()), "grpo": grpo,
    "lagging": lagging, "lagging ahead": streamed_lagging,
    "sft": sft, "adapters": adapters, "reward model": reward_model,
}  # fmt: skip
# More samplers than before cut a batch into more parts: round-off differs, bits need not agree.
CUT_OTHERWISE = ("grpo, then two samplers",)


def reference_of(name: str) -> str:
    """The uninterrupted run that the run `name` must be equal to."""
    return name if name in UNINTERRUPTED else name.partition(",")[0]


def comparable(result: dict[str, Any], sampled_here: bool) -> dict[str, Any]:
    """A result without times; as JSON holds it, which keeps every bit of a float."""
    kept = {name: value for name, value in result.items() if name not in TIMES}
    kept["weights"] = result.get("weights", {}).get("version")
    if not sampled_here:
        kept = {name: kept[name] for name in (*tiny.LEARNT, "eval", "effective") if name in kept}
    kept = {name: _without_times(value) for name, value in kept.items()}
    return json.loads(json.dumps(kept, default=float), parse_constant=str)  # nan equals nan


def _without_times(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key: _without_times(part) for key, part in value.items()
        if not key.endswith(("_time", "_timer", "_seconds", "_s", "_throughput", "timers"))
    }  # fmt: skip


def train(algorithm, num_iterations: int) -> list[dict[str, Any]]:
    """Comparable results of so many iterations."""
    here = not algorithm.config.num_env_runners
    return [comparable(algorithm.train(), here) for _ in range(num_iterations)]


def texts(algorithm) -> list[dict[str, Any]]:
    """Prompts and completions that were trained on, in order."""
    file = algorithm.trial_folder / SAMPLES_FILE
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["split"] == "train"]


def go_on(folder: Path, config) -> None:
    """Restores, trains on, writes the results; then goes back once more, in the live algorithm."""
    checkpoint = str(folder / "checkpoint")
    with tiny.built(config) as algorithm:
        algorithm.restore_from_path(checkpoint)
        results = train(algorithm, NUM_AFTER)
        save_file(tiny.weights(algorithm), folder / "weights.safetensors")
        seen = texts(algorithm)
        algorithm.restore_from_path(checkpoint)
        again = train(algorithm, 2)
    outcome = {"results": results, "texts": seen, "again": again}
    (folder / "outcome.json").write_text(json.dumps(outcome), encoding="utf-8")


def main(folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    for name, (_, after) in RUNS.items():
        go_on(folder / name, after())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
