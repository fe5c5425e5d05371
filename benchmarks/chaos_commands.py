"""A run that is told things at random moments learns what an undisturbed one learns, bit for bit.

    python -m benchmarks.chaos_commands [--commands 25] [--schedules synchronous,lockstep]

For each schedule GRPO on sums runs under Tune with an overseer, and is told pause, resume, scale,
checkpoint and stop at random moments, over HTTP as `rllib` does; after a stop it is resumed from
where it was saved. Once it was told so many things it ends after the iteration that it is at. Then
the same run goes undisturbed, and without an overseer, to the same iteration. JSON: what was told
and how it was answered, and whether the final weights are the same.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from safetensors.torch import load_file

from rllib_llm import GRPOConfig, default_callbacks
from rllib_llm.examples import arithmetic
from rllib_llm.overseer.service import Run, find_run
from rllib_llm.shared.errors import Problems

NAMES = ("pause", "scale", "checkpoint", "stop")
WEIGHTS = (4, 4, 3, 2)  # how often each is told; resume follows a pause
MAX_SAMPLERS = 3
JUDGE_SECONDS = 0.2  # so that an iteration takes longer than a command
ANSWER_SECONDS = 120.0
PAUSE_SECONDS = (0.0, 2.0)
BETWEEN_SECONDS = (0.0, 2.5)
ENOUGH = "enough"  # file that ends a run


def build_model() -> Any:
    return arithmetic.build_model(3, hidden_size=16, num_layers=1, num_heads=2, max_len=32)


def judge(completions: list[str]) -> list[float]:
    """Digits less other characters, after a while."""
    time.sleep(JUDGE_SECONDS)
    return [float(sum(1 if c.isdigit() else -1 for c in text)) for text in completions]


def make_config(schedule: str, *, overseer: bool) -> GRPOConfig:
    prompts = [{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)]
    here = "benchmarks.chaos_commands"
    config = (
        GRPOConfig()
        .language_model(model=f"{here}.build_model")
        .environment(
            "rllib_llm/RLHF-v0",
            env_config={"prompts": prompts, "reward_functions": f"{here}.judge",
                        "max_prompt_len": 8},
        )
        .env_runners(num_env_runners=1)
        .sampling(num_completions=3, max_new_tokens=4, log_samples_every=0)
        .training(train_batch_size_per_learner=24, minibatch_size=12, lr=1e-3)
        .fault_tolerance(overseer=overseer)
    )  # fmt: skip
    if schedule == "lockstep":
        return config.streaming(max_staleness=1).training(off_policy="decoupled")
    return config.sampling(sampling_parts=MAX_SAMPLERS)


class EndsWhenEnough(tune.Stopper):
    """Ends a run after the iteration at which there is a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return self._file.exists()

    def stop_all(self) -> bool:
        return False


class Teller(threading.Thread):
    """Tells a run things at random moments until there were enough, and then lets it end."""

    def __init__(self, folder: Path, num_commands: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._folder, self._num_commands = folder, num_commands
        self._chance = random.Random(seed)
        self.told: Counter[str] = Counter()
        self.unanswered: list[str] = []
        self._known = ""  # the trial's process that the last stop went to

    def run(self) -> None:
        while self.told.total() < self._num_commands:
            run = self._wait_for_run()
            time.sleep(self._chance.uniform(*BETWEEN_SECONDS))
            (name,) = self._chance.choices(NAMES, WEIGHTS)
            self._tell(run, name)
            if name == "pause":
                time.sleep(self._chance.uniform(*PAUSE_SECONDS))
                self._tell(run, self._chance.choice(["resume", "resume", "checkpoint"]))
                self._tell(run, "resume")
        (self._folder.parent / ENOUGH).touch()
        self._tell(self._wait_for_run(), "resume")

    def _tell(self, run: Run, name: str) -> None:
        arguments = {"samplers": self._chance.randint(1, MAX_SAMPLERS)} if name == "scale" else {}
        waits = self._chance.choice([True, True, False]) and name != "pause"
        try:
            told = run.tell(name, timeout_s=ANSWER_SECONDS if waits or name == "stop" else 0.0,
                            **arguments)  # fmt: skip
        except Problems as error:
            self.unanswered.append(f"{name}: {error}")
            return
        for one in told:
            self.told[f"{name}: {one['state']}"] += 1
        if name == "stop" and told:
            self._known = told[0]["incarnation"]

    def _wait_for_run(self) -> Run:
        """The run, once a trial reports that was not stopped."""
        while True:
            try:
                run = find_run(self._folder)
                trials = [part for part in run.status()["parts"] if part["kind"] == "trial"]
                if any(t["incarnation"] != self._known and not t["is_silent"] for t in trials):
                    return run
            except Problems:
                pass
            time.sleep(0.1)


def run_config(folder: Path, stop: Any) -> tune.RunConfig:
    return tune.RunConfig(
        name="run", storage_path=str(folder), stop=stop, verbose=0, callbacks=default_callbacks(),
        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True, num_to_keep=2),
    )  # fmt: skip


def fit(folder: Path, config: GRPOConfig, stop: Any) -> Any:
    """The result of an undisturbed run."""
    return tune.Tuner("GRPO", param_space=config, run_config=run_config(folder, stop)).fit()[0]


def fit_disturbed(folder: Path, config: GRPOConfig, teller: Teller) -> tuple[Any, int]:
    """The result of a run that is stopped now and then, and how often it was resumed."""
    tuner = tune.Tuner(
        "GRPO",
        param_space=config,
        run_config=run_config(folder, EndsWhenEnough(folder / ENOUGH)),
    )
    num_resumed = 0
    teller.start()
    while not (result := tuner.fit()[0]).metrics.get("done"):  # it was told to stop
        num_resumed += 1
        tuner = tune.Tuner.restore(str(folder / "run"), "GRPO", param_space=config)
    return result, num_resumed


def weights(result: Any) -> dict[str, torch.Tensor]:
    (file,) = Path(result.checkpoint.path).rglob("*.safetensors")
    return load_file(file)


def compare(folder: Path, schedule: str, num_commands: int, seed: int) -> dict[str, Any]:
    """What `num_commands` commands did to a run."""
    teller = Teller(folder / "told" / "run", num_commands, seed)
    told, num_resumed = fit_disturbed(folder / "told", make_config(schedule, overseer=True), teller)
    iterations = told.metrics["training_iteration"]
    plain = fit(folder / "plain", make_config(schedule, overseer=False),
                {"training_iteration": iterations})  # fmt: skip
    expected, found = weights(plain), weights(told)
    same = expected.keys() == found.keys() and all(
        torch.equal(expected[name], found[name]) for name in expected
    )
    return {
        "schedule": schedule, "iterations": iterations, "same_weights": same,
        "commands": teller.told.total(), "told": dict(sorted(teller.told.items())),
        "resumed_after_stop": num_resumed, "unanswered": teller.unanswered,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--commands", type=int, default=25, help="for each schedule")
    parser.add_argument("--schedules", default="synchronous,lockstep")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as root:
        for schedule in args.schedules.split(","):
            found = compare(Path(root) / schedule, schedule, args.commands, args.seed)
            print(json.dumps(found, indent=1), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
