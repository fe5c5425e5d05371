"""Samplers that leave a stream and come to it: what they hold, and what they are called."""

from __future__ import annotations

import threading

import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError

from rllib_llm.rollouts import workers as module
from rllib_llm.rollouts.errors import Faults, SampleFailure
from rllib_llm.rollouts.sampler_pool import SamplerPool
from rllib_llm.rollouts.schedule import ServingSettings
from rllib_llm.rollouts.workers import SECONDS_GONE, PulledLeases


class Actors:
    """`SamplerActors` that answer at once; one that left cannot be asked."""

    are_gone = False

    def __init__(self, *workers):
        self.workers = list(workers)
        self.killed = []

    def healthy(self):
        return self.workers

    def call(self, worker, method, *args):
        assert worker in self.workers
        return worker

    def ready(self, calls, timeout_s):
        return calls

    def answer(self, call, timeout_s=None):
        assert call in self.workers, "nobody asks one that has left"

    def mark(self, worker, *, healthy):
        assert worker in self.workers

    def kill(self, worker):
        self.killed.append(worker)

    def processes(self, worker):
        return [100 + worker]


class Ledger:
    """Notes what is called."""

    actor = None

    def __init__(self):
        self.called = []

    def call(self, name, *args):
        self.called.append((name, *args))

    def close(self):
        """Nobody waits."""

    stop = close


class Starvation:
    """Seconds that processes have waited for a core since the last look, as a test says."""

    def __init__(self):
        self.seconds = {}

    def __call__(self, pids):
        return Watched(self.seconds, tuple(pids))


class Watched:
    def __init__(self, seconds, pids):
        self.seconds, self.pids = seconds, pids

    def take(self):
        return self.seconds.pop(self.pids[0], 0.0)


@pytest.fixture
def starvation():
    return Starvation()


@pytest.fixture
def world(monkeypatch, starvation):
    """(workers of two samplers, their actors, the ledger, the clock)"""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    actors, ledger = Actors(1, 2), Ledger()
    pool = SamplerPool(actors, Faults())
    workers = PulledLeases(pool, ledger, ServingSettings(1), starvation=starvation)
    workers._look()
    return workers, actors, ledger, now


def look(workers, now, seconds=1.0):
    now[0] += seconds
    workers.work()


def test_a_sampler_that_had_no_core_is_given_more_time(world, starvation):
    """By the ledger, and before it counts as silent itself: no answer in 120 s of which it could
    work in 60 is none that is hung."""
    workers, actors, ledger, now = world
    actors.ready = lambda calls, timeout_s: [call for call in calls if call != 2]
    look(workers, now)
    starvation.seconds[102] = 60.0
    look(workers, now, 130.0)
    assert ledger.called == [("put_off", "2", 60.0)] and actors.killed == []
    look(workers, now, 60.0)
    assert actors.killed == [2]


def test_what_a_sampler_held_that_left_waits_again(world):
    workers, actors, ledger, now = world
    look(workers, now)
    assert ledger.called == []
    actors.workers.remove(2)
    look(workers, now)
    look(workers, now)
    # As of a sampler that holds nothing. Its last call may come late, so it is said again.
    assert ledger.called == [("give_back", "2")] * 2
    look(workers, now, SECONDS_GONE + 1)
    ledger.called.clear()
    look(workers, now)
    assert ledger.called == []


def test_one_that_raises_is_alive_and_its_exception_is_told_to_the_ledger(world):
    workers, actors, ledger, now = world

    def answer(call):
        if call == 2:
            raised = RayTaskError("apply", "at its place", ValueError("a bad judge"))
            raise raised.as_instanceof_cause()

    actors.answer = answer
    look(workers, now)
    ((name, sampler, failure),) = ledger.called
    assert (name, sampler) == ("give_back", "2") and failure.error.startswith(
        "RayTaskError(ValueError)"
    )
    assert "at its place" in failure.error
    assert actors.killed == []


def test_one_that_comes_is_not_taken_for_one_that_left(world):
    workers, actors, ledger, now = world
    actors.workers.remove(2)
    look(workers, now)
    actors.workers.append(3)
    ledger.called.clear()
    look(workers, now)
    assert ledger.called == [("give_back", "2")]  # its last call may come late
    workers.replace("3", "silent")
    assert actors.killed == [3] and ledger.called[1:] == [("give_back", "3")]  # at once
    workers.replace("2", "silent")  # nobody is killed
    assert actors.killed == [3]


def test_a_silent_one_is_replaced(world):
    workers, actors, ledger, now = world
    actors.workers[1] = 3
    actors.ready = lambda calls, timeout_s: [call for call in calls if call != 3]
    look(workers, now)
    look(workers, now, 130.0)
    assert actors.killed == [3]


def test_losses_count_in_a_row_and_not_over_the_whole_wait_for_a_batch(world):
    """A batch of hours may see many samplers preempted while others hand in groups."""
    workers, actors, ledger, now = world
    for _ in range(10):
        workers.replace("1", "silent")
        workers.note_progress()
        look(workers, now)
    for _ in range(6):
        workers.replace("1", "silent")
    with pytest.raises(RuntimeError, match="6 times in a row"):
        look(workers, now)


def test_what_one_held_that_dies_while_the_learner_trains_waits_again(world):
    """Nobody looked at samplers before the next batch was asked for."""
    workers, actors, ledger, now = world
    given_back = threading.Event()

    def call(name, *args):
        ledger.called.append((name, *args))
        given_back.set()

    def answer(call):
        if call == 2:
            raise ActorUnavailableError("it died", None)

    ledger.call, actors.answer = call, answer
    now[0] += 1.0
    workers.watch()
    assert given_back.wait(60.0)
    workers.stop()
    assert ledger.called == [("give_back", "2")]


def test_one_whose_stream_ended_is_not_asked_again_before_the_driver_has_heard_of_it(world):
    """What passes by itself would happen each second of a long update, and end the run."""
    workers, actors, ledger, now = world
    asked = []
    call = actors.call
    actors.call = lambda worker, *args: (asked.append(worker), call(worker, *args))[1]
    failure = SampleFailure("a failure", "")
    actors.answer = lambda call: failure if call == 2 else None
    for _ in range(3):
        now[0] += 1.0
        workers._look()
    assert ledger.called == [("give_back", "2", failure)] and asked == [1, 1, 1]
    actors.answer = lambda call: None
    look(workers, now)
    assert asked == [1, 1, 1, 1, 2]
