"""A run that is told things at random moments learns what an undisturbed one learns, bit for bit.

    python benchmarks/chaos_commands.py [--rounds 50] [--iterations 12] [--commands 12]

Each round runs GRPO on sums under Tune with two samplers, and tells it pause, resume, scale and
checkpoint at random moments through the overseer's HTTP; in every fourth round the overseer is
killed as well. JSON: rounds, commands by answer, and the rounds whose final weights differ.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray
from ray import tune

from rllib_llm import GRPOConfig, default_callbacks
from rllib_llm.overseer.actor import NAMESPACE, overseer_name
from rllib_llm.overseer.client import Run, find_run
from rllib_llm.user_errors import UserError

COMMANDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("pause", {}),
    ("scale", {"samplers": 1}),
    ("scale", {"samplers": 2}),
    ("scale", {"samplers": 3}),
    ("checkpoint", {}),
)
PARTS = 3
KILLED_EVERY = 4


def make_config() -> GRPOConfig:
    return (
        GRPOConfig()
        .language_model(model="rllib_llm.envs.toys.arithmetic.build_model")
        .environment("rllib_llm/Arithmetic-v0")
        .env_runners(num_env_runners=2)
        .sampling(num_completions=4, max_new_tokens=4, sampling_parts=PARTS, log_samples_every=0)
        .training(train_batch_size_per_learner=48, minibatch_size=24, lr=1e-3)
    )


def make_tuner(folder: Path, iterations: int) -> tune.Tuner:
    return tune.Tuner(
        "GRPO",
        param_space=make_config(),
        run_config=tune.RunConfig(
            name="run",
            storage_path=str(folder),
            stop={"training_iteration": iterations},
            verbose=0,
            callbacks=default_callbacks(),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True, num_to_keep=2),
        ),
    )


def weights_hash(folder: Path) -> str:
    """Of the final model's files."""
    newest = max(folder.glob("run/*/checkpoint_*"), key=lambda path: path.name)
    digest = hashlib.sha256()
    for file in sorted(newest.rglob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def disturb(run: Run, chance: random.Random, num_commands: int, seen: Counter) -> None:
    """Tells the run things at random moments, until it has ended or there are enough."""
    for _ in range(num_commands):
        time.sleep(chance.uniform(0.0, 1.5))
        name, arguments = chance.choice(COMMANDS)
        try:
            for told in run.tell(name, timeout_s=chance.choice((0.0, 3.0)), **arguments):
                seen[f"{name}: {told['state']}"] += 1
            time.sleep(chance.uniform(0.0, 1.0))
            run.tell("resume")
        except UserError:
            seen["nobody answered"] += 1


def one_round(folder: Path, args: argparse.Namespace, chance: random.Random, seen: Counter,
              kills: bool) -> str:  # fmt: skip
    tuner = make_tuner(folder, args.iterations)
    thread = threading.Thread(target=tuner.fit, daemon=True)
    thread.start()
    run = None
    while run is None and thread.is_alive():
        with contextlib.suppress(UserError):
            run = find_run(folder / "run")
        time.sleep(0.1)
    if run is not None:
        if kills:
            actor = ray.get_actor(overseer_name(folder / "run"), namespace=NAMESPACE)
            ray.kill(actor, no_restart=False)
            seen["overseer killed"] += 1
        disturb(run, chance, args.commands, seen)
    while thread.is_alive():
        if run is not None:
            with contextlib.suppress(UserError):
                run.tell("resume")
        thread.join(1.0)
    return weights_hash(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--commands", type=int, default=12)
    args = parser.parse_args()
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False)
    chance, seen = random.Random(0), Counter()
    with tempfile.TemporaryDirectory() as root:
        make_tuner(Path(root) / "plain", args.iterations).fit()
        expected = weights_hash(Path(root) / "plain")
        different = []
        for number in range(args.rounds):
            kills = number % KILLED_EVERY == KILLED_EVERY - 1
            folder = Path(root) / str(number)
            if one_round(folder, args, chance, seen, kills) != expected:
                different.append(number)
    print(json.dumps({"rounds": args.rounds, "different": different, "told": seen}, indent=1))
    ray.shutdown()


if __name__ == "__main__":
    main()
