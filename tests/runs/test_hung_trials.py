"""A trial that reports nothing for too long is killed, and only that one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rllib_llm.runs import callbacks as module
from rllib_llm.runs.callbacks import RestartHungTrials


def trial(name, status="RUNNING", actor="an actor"):
    state = SimpleNamespace(ray_actor=actor and f"{actor} of {name}")
    return SimpleNamespace(trial_id=name, status=status, temporary_state=state, is_saving=False)


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def world(monkeypatch):
    """(clock, actors that were killed)"""
    clock, killed = Clock(), []
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "ray", SimpleNamespace(kill=killed.append))
    monkeypatch.setattr(module, "processes_of", lambda actor: [])
    return clock, killed


def test_the_silent_trial_is_killed(world):
    clock, killed = world
    callback, trials = RestartHungTrials(timeout_s=10.0), [trial("a"), trial("b")]
    for one in trials:
        callback.on_trial_start(one)
    clock.now = 9.0
    callback.on_trial_result(trials[0], {})
    callback.on_step_end(1, trials)
    assert killed == []
    clock.now = 11.0
    callback.on_step_end(2, trials)
    assert killed == ["an actor of b"]
    callback.on_step_end(3, trials)  # it has had no time to come back yet
    assert killed == ["an actor of b"]


def test_auto_follows_the_trial(world):
    clock, killed = world
    callback, trials = RestartHungTrials(), [trial("a")]
    callback.on_trial_start(trials[0])
    for clock.now in (100.0, 130.0):  # the first result took longest
        callback.on_trial_result(trials[0], {})
    clock.now += 1000.0
    callback.on_step_end(1, trials)
    assert killed == []
    clock.now += 1.0
    callback.on_step_end(2, trials)
    assert killed == ["an actor of a"]


def test_a_trial_that_waits_or_rests_is_left_alone(world):
    clock, killed = world
    callback = RestartHungTrials(timeout_s=10.0)
    trials = [trial("a", "PENDING", actor=None), trial("b", "PAUSED")]
    callback.on_trial_start(trials[1])
    for clock.now in (100.0, 200.0):
        callback.on_step_end(0, trials)
    trials[1].status = "RUNNING"
    callback.on_step_end(0, trials)
    assert killed == []


def test_a_trial_is_not_blamed_for_time_that_tune_took(world):
    clock, killed = world
    callback, trials = RestartHungTrials(timeout_s=10.0), [trial("a")]
    callback.on_trial_start(trials[0])
    callback.on_step_end(0, trials)
    clock.now = 100.0  # a callback waited for a server
    callback.on_step_end(1, trials)
    assert killed == []
    for clock.now in (104.0, 108.0):  # 5 s of the long step count
        callback.on_step_end(2, trials)
    assert killed == ["an actor of a"]


def save(clock, callback, trials, seconds):
    """The only trial saves a checkpoint, Tune looking after it every four seconds."""
    trials[0].is_saving = True
    for _ in range(int(seconds // 4)):
        clock.now += 4.0
        callback.on_step_end(0, trials)
    callback.on_trial_save(trials[0])
    trials[0].is_saving = False


@pytest.mark.parametrize("timeout_s", ["auto", 60.0])
def test_saving_may_take_longer_than_an_iteration(world, timeout_s):
    clock, killed = world
    callback, trials = RestartHungTrials(timeout_s), [trial("a")]
    callback.on_trial_start(trials[0])
    for _ in range(3):
        clock.now += 9.0
        callback.on_trial_result(trials[0], {})
        save(clock, callback, trials, 152.0)
    assert killed == []
    # Saves say nothing of iterations: 120 s or 60 s are the limit of these as before.
    for _ in range(31 if timeout_s == "auto" else 16):
        clock.now += 4.0
        callback.on_step_end(0, trials)
    assert killed == ["an actor of a"]


def test_a_save_that_hangs_is_ended_too(world):
    clock, killed = world
    callback, trials = RestartHungTrials(), [trial("a")]
    callback.on_trial_start(trials[0])
    clock.now += 9.0
    callback.on_trial_result(trials[0], {})
    save(clock, callback, trials, 152.0)
    trials[0].is_saving = True
    for _ in range(1520 // 4 + 1):
        assert killed == []
        clock.now += 4.0
        callback.on_step_end(0, trials)
    assert killed == ["an actor of a"]


class ScriptedStarvation:
    """Stands for `StarvedProcesses`: of the time between two looks, the share that the processes
    waited for cores."""

    def __init__(self, clock, share):
        self.clock, self.share, self.at = clock, share, clock.now

    def take(self):
        passed, self.at = self.clock.now - self.at, self.clock.now
        return self.share * passed


def silent_for(clock, callback, trials, seconds):
    for _ in range(int(seconds)):
        clock.now += 1.0
        callback.on_step_end(0, trials)


def test_a_starved_trial_is_not_a_hung_one(world, monkeypatch):
    clock, killed = world
    share = 0.9
    monkeypatch.setattr(
        module, "StarvedProcesses", lambda pids, ticks: ScriptedStarvation(clock, share)
    )
    callback, trials = RestartHungTrials(timeout_s=100.0), [trial("a")]
    callback.on_trial_start(trials[0])
    # It is looked at from 50 s on; of what is left of the limit, a tenth of each second counts.
    silent_for(clock, callback, trials, 50 + 499)
    assert killed == []
    silent_for(clock, callback, trials, 3)
    assert killed == ["an actor of a"]


def test_a_trial_that_was_paused_is_given_time_again(world, monkeypatch):
    clock, killed = world
    says_paused = [True]
    ear = SimpleNamespace(activity=lambda: ("paused: ..", 0.0) if says_paused[0] else None)
    monkeypatch.setattr(module, "local_folder", lambda trial: Path("a"))
    monkeypatch.setattr(module, "TrialEar", lambda folder: ear)
    callback, trials = RestartHungTrials(timeout_s=100.0), [trial("a")]
    callback.on_trial_start(trials[0])
    silent_for(clock, callback, trials, 10_000)
    says_paused[0] = False
    silent_for(clock, callback, trials, 50)  # it is looked at every 50 s, half of the limit
    assert killed == []
    silent_for(clock, callback, trials, 51)
    assert killed == ["an actor of a"]
