"""Runs under Tune that are told what to do, or left by their overseer, learn the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file

from rllib_llm.overseer.service import NAMESPACE, find_run, overseer_name
from rllib_llm.shared.errors import Problems
from tests.algorithms import tiny_runs as tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]
PATIENCE_S = 400.0
ITERATIONS = 6
SCHEDULES = {"synchronous": 0, "lockstep": 1}  # max_staleness


def gated_digits(completions, gate):
    """As `tiny.num_digits`, once there is a file of the name `gate`, and slowly."""
    while not Path(gate).exists():
        time.sleep(0.05)
    time.sleep(0.1)
    return tiny.num_digits(completions)


def make_config(gate: Path, schedule: str, overseer: bool):
    config = tiny.grpo().env_runners(num_env_runners=1).fault_tolerance(overseer=overseer)
    judge = {"function": f"{__name__}.gated_digits", "kwargs": {"gate": str(gate)}}
    config.env_config["reward_functions"] = judge
    if schedule == "lockstep":
        return config.streaming(max_staleness=1).training(off_policy="decoupled")
    return config.sampling(sampling_parts=2)


class TuneRun:
    """A Tuner in a thread of its own; its first iteration ends once there is the gate."""

    def __init__(self, folder: Path, schedule: str, *, overseer: bool = True) -> None:
        from ray import tune

        from rllib_llm.runs import default_callbacks

        self.folder, self.gate = folder / "run", folder / "gate"
        config = make_config(self.gate, schedule, overseer)
        self.tuner = tune.Tuner(
            config.algo_class,
            param_space=config,
            run_config=tune.RunConfig(
                name="run",
                storage_path=str(folder),
                stop={"training_iteration": ITERATIONS},
                verbose=0,
                callbacks=default_callbacks(),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
            ),
        )
        self._grid = None
        self._thread = threading.Thread(target=self._fit, daemon=True)
        self._thread.start()

    def _fit(self) -> None:
        self._grid = self.tuner.fit()

    def weights(self) -> dict[str, torch.Tensor]:
        """The final ones."""
        self._thread.join(PATIENCE_S)
        assert self._grid is not None, "the run did not end"
        (file,) = Path(self._grid[0].checkpoint.path).rglob("*.safetensors")
        return load_file(file)

    def overseen(self):
        """The run, once its overseer knows the trial and its sampler."""

        def known():
            try:
                run = find_run(self.folder)
                kinds = {part["kind"] for part in run.status()["parts"]}
                return run if kinds == {"trial", "sampler"} else None
            except Problems:
                return None

        return until(known)

    def overseer(self):
        """Its actor."""
        return ray.get_actor(overseer_name(self.folder), namespace=NAMESPACE)


def until(condition: Callable, seconds: float = PATIENCE_S):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError("it did not come about")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, ray_session) -> dict[str, dict[str, torch.Tensor]]:
    """Final weights by schedule, of runs that nobody oversees."""
    found = {}
    for schedule in SCHEDULES:
        run = TuneRun(tmp_path_factory.mktemp("plain"), schedule, overseer=False)
        run.gate.touch()
        found[schedule] = run.weights()
    return found


def num_samplers(run) -> int:
    return sum(part["kind"] == "sampler" for part in run.status()["parts"])


def tell_before_the_gate_opens(tuned: TuneRun, run, command: str, **arguments):
    """Has the trial hear of a command before it ends its iteration, and then end it."""

    def heard() -> float:
        return next(
            sum(p["seconds"].values()) for p in run.status()["parts"] if p["kind"] == "trial"
        )

    before = heard()
    told = run.tell(command, **arguments)
    until(lambda: heard() > before + 2)  # reports are a second apart, and bring commands back
    tuned.gate.touch()
    return told


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_that_is_paused_scaled_and_saved_learns_the_same(tmp_path, undisturbed, schedule):
    tuned = TuneRun(tmp_path, schedule)
    run = tuned.overseen()
    tell_before_the_gate_opens(tuned, run, "pause")
    (scaled,) = run.tell("scale", timeout_s=PATIENCE_S, samplers=2)
    assert scaled["answer"] == "2 samplers instead of 1"
    until(lambda: num_samplers(run) == 2)
    (folder,) = tuned.folder.glob("GRPO_*")
    assert all(part["trial"] in folder.name for part in run.status()["parts"])  # Tune's id
    if schedule == "synchronous":
        (refused,) = run.tell("scale", timeout_s=60, samplers=3)
        assert refused["state"] == "refused" and "sampling_parts" in refused["answer"]
    for _ in range(2):  # the second time there is nothing new, and it stays paused
        (saved,) = run.tell("checkpoint", timeout_s=60)
        assert (saved["state"], saved["answer"]) == ("done", "iteration 1 is being saved")
        until(lambda: any(tuned.folder.glob("*/checkpoint_*")))
    tuned.gate.unlink()
    (resumed,) = run.tell("resume", timeout_s=60)
    assert resumed["answer"] == "resumes after iteration 1"
    (scaled,) = tell_before_the_gate_opens(tuned, run, "scale", samplers=1)
    until(lambda: run._updated([scaled])[0]["answer"] == "1 samplers instead of 2")
    tiny.assert_same_weights(tuned.weights(), undisturbed[schedule])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_goes_on_when_its_overseer_dies_or_hangs(tmp_path, undisturbed, number):
    tuned = TuneRun(tmp_path, "synchronous")
    tuned.overseen()
    pid = ray.get(tuned.overseer().pid.remote())
    os.kill(pid, number)
    tuned.gate.touch()
    try:
        tiny.assert_same_weights(tuned.weights(), undisturbed["synchronous"])
    finally:
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGKILL)


def test_an_overseer_that_hangs_is_started_again_and_a_paused_run_can_be_resumed(tmp_path):
    tuned = TuneRun(tmp_path, "synchronous")
    run = tuned.overseen()
    tell_before_the_gate_opens(tuned, run, "pause")
    until(lambda: any(part.get("paused") for part in run.status()["parts"]))
    os.kill(ray.get(tuned.overseer().pid.remote()), signal.SIGSTOP)

    def resumed():
        try:
            told = run.tell("resume", timeout_s=10)
            return bool(told) and told[0]["state"] == "done"
        except Problems:
            return False

    until(resumed)
    tuned.weights()
