"""Runs under Tune that are watched, told what to do, and left by their overseer."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from rllib_llm.overseer.actor import NAMESPACE, overseer_name
from rllib_llm.overseer.client import find_run
from rllib_llm.user_errors import UserError
from tests.algorithms import tiny_runs as tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]
PATIENCE_S = 400.0


def gated_digits(completions, gate):
    """As `tiny.num_digits`, once there is a file of the name `gate`, and slowly."""
    while not Path(gate).exists():
        time.sleep(0.05)
    time.sleep(0.2)
    return tiny.num_digits(completions)


class TuneRun:
    """A Tuner in a thread of its own."""

    def __init__(self, folder: Path, iterations: int) -> None:
        from ray import tune

        from rllib_llm.tune import default_callbacks

        self.folder = folder / "run"
        self.gate = folder / "gate"
        config = make_config(self.gate)
        self.tuner = tune.Tuner(
            config.algo_class,
            param_space=config,
            run_config=tune.RunConfig(
                name="run",
                storage_path=str(folder),
                stop={"training_iteration": iterations},
                verbose=0,
                callbacks=default_callbacks(),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
            ),
        )
        self.grid = None
        self.thread = threading.Thread(target=self.fit, daemon=True)

    def go(self) -> TuneRun:
        """Lets the first iteration end."""
        self.gate.touch()
        return self

    def start(self) -> TuneRun:
        """Begins, and goes on beside the test."""
        self.thread.start()
        return self

    def fit(self) -> None:
        """To its end."""
        self.grid = self.tuner.fit()

    def result(self):
        """Of its trial, at its end."""
        self.thread.join(PATIENCE_S)
        assert self.grid is not None, "the run did not end"
        return self.grid[0]

    def run(self):
        """Its overseer, once it knows the trial and its sampler."""

        def known():
            try:
                run = find_run(self.folder)
                kinds = {part["kind"] for part in run.status()["parts"]}
                return run if kinds == {"trial", "sampler"} else None
            except UserError:
                return None

        return until(known)


def until(condition: Callable, seconds: float = PATIENCE_S):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError("it did not come about")


def make_config(gate: Path):
    config = tiny.grpo().env_runners(num_env_runners=1).sampling(sampling_parts=2)
    judge = {"function": f"{__name__}.gated_digits", "kwargs": {"gate": str(gate)}}
    config.env_config["reward_functions"] = judge
    return config


def learnt(result) -> list[dict]:
    """What was learnt in each iteration, with everything that depends on time left out."""
    frame = result.metrics_dataframe
    names = [name for name in frame.columns if name.partition("/")[0] in ("objective", "loss")]
    return frame[names].to_dict("records")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, ray_session) -> list[dict]:
    return learnt(TuneRun(tmp_path_factory.mktemp("plain"), 8).go().start().result())


def trial_of(run) -> dict:
    return next(part for part in run.status()["parts"] if part["kind"] == "trial")


def test_a_run_that_is_paused_scaled_and_saved_learns_the_same(tmp_path, undisturbed):
    tuned = TuneRun(tmp_path, 8).start()
    run = tuned.run()
    heard = sum(trial_of(run)["seconds"].values())
    run.tell("pause")
    # The next report brings the command back.
    until(lambda: sum(trial_of(run)["seconds"].values()) > heard + 2)
    tuned.go()
    until(lambda: trial_of(run)["paused"])
    (scaled,) = run.tell("scale", timeout_s=60, samplers=2)
    assert scaled["answer"] == "2 samplers instead of 1"
    (refused,) = run.tell("scale", timeout_s=60, samplers=3)
    assert refused["state"] == "refused" and "sampling_parts" in refused["answer"]
    (saved,) = run.tell("checkpoint", timeout_s=60)
    assert saved["state"] == "done"
    until(lambda: any(tuned.folder.glob("*/checkpoint_*")))
    names = [part["part"] for part in run.status()["parts"]]
    assert sum(name.startswith("sampler") for name in names) == 2, names
    run.tell("resume", timeout_s=60)
    assert learnt(tuned.result()) == undisturbed


def test_idle_intervals_add_up_and_the_judge_is_named(tmp_path):
    tuned = TuneRun(tmp_path, 12).start()
    run = tuned.run()
    tuned.go()
    found = until(lambda: trial_of(run) if trial_of(run)["iteration"] >= 3 else None)
    assert run.status()["diagnoses"][found["part"]]["bound"] == "judge"
    for shares in tuned.result().metrics_dataframe.filter(like="time_share/").to_dict("records"):
        known = [v for name, v in shares.items() if not name.endswith("starved") and v == v]
        assert sum(known) == pytest.approx(1, abs=0.02)


def test_a_run_goes_on_when_its_overseer_dies_or_hangs(tmp_path, undisturbed):
    tuned = TuneRun(tmp_path, 8).start()
    tuned.run()
    ray.kill(ray.get_actor(overseer_name(tuned.folder), namespace=NAMESPACE))
    tuned.go()
    assert learnt(tuned.result()) == undisturbed


@pytest.mark.parametrize("seed", [0, 1])
def test_commands_at_random_moments_change_nothing(tmp_path, undisturbed, seed):
    tuned = TuneRun(tmp_path, 8).start()
    run, chance = tuned.run(), random.Random(seed)
    tuned.go()
    commands = [("pause", {}), ("scale", {"samplers": 1}), ("scale", {"samplers": 2}),
                ("checkpoint", {})]  # fmt: skip
    try:
        for _ in range(6):
            name, arguments = chance.choice(commands)
            run.tell(name, **arguments)
            time.sleep(chance.uniform(0, 0.6))
            run.tell("resume")
    except UserError:
        pass  # the run was quicker
    while tuned.thread.is_alive():
        with contextlib.suppress(UserError):
            run.tell("resume")  # one may have come before its pause was carried out
        tuned.thread.join(1.0)
    assert learnt(tuned.result()) == undisturbed


def test_stop_saves_and_ends(tmp_path):
    tuned, told = TuneRun(tmp_path, 1000), []

    def stop() -> None:
        run = tuned.run()
        tuned.go()
        told.extend(run.tell("stop", timeout_s=PATIENCE_S))

    threading.Thread(target=stop, daemon=True).start()
    tuned.fit()  # in the main thread, as scripts do: Tune ends by its handler of Ctrl-C
    result = tuned.grid[0]
    assert result.checkpoint is not None
    assert result.metrics["training_iteration"] < 1000
    assert result.metrics["stop_run"]
