"""Calls of an actor that are repeated, and whether one that gives no answer hangs."""

from __future__ import annotations

import itertools

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RaySystemError

from rllib_llm.shared.remote import NamedActor, Silence


class Starved:
    """Seconds without a core at each look, as a test says."""

    def __init__(self, seconds):
        self.seconds = seconds

    def take(self):
        return self.seconds.pop(0)


def silence(pids, seconds):
    """Of an actor with these processes at each look."""
    pids, seconds = list(pids), list(seconds)
    processes = {True: lambda: pids.pop(0), False: list}
    return Silence(10.0, lambda anywhere: processes[anywhere](), lambda _: Starved(seconds))


def test_an_actor_that_owes_two_answers_hangs():
    made = silence([[7]] * 4, [0.0, 0.0])
    # After it was killed it is looked at anew.
    assert [made.is_that_of_hung() for _ in range(4)] == [False, True, False, True]


def test_an_actor_that_is_being_started_does_not_hang():
    """It imports what it needs, which may take longer than an answer on a busy machine; were it
    killed for that, it would be started again and again."""
    made = silence([[7], [], [], [8], [8]], [0.0])
    assert [made.is_that_of_hung() for _ in range(5)] == [False, False, False, False, True]


def test_an_actor_without_a_core_does_not_hang():
    made = silence([[7]] * 4, [9.0, 6.0, 4.0])
    assert [made.is_that_of_hung() for _ in range(4)] == [False, False, False, True]


def test_an_answer_begins_the_count_anew():
    made = silence([[7]] * 3, [0.0])
    assert not made.is_that_of_hung()
    made.end()
    assert [made.is_that_of_hung() for _ in range(2)] == [False, True]


AWAY = ActorUnavailableError("away", None)


class Handle:
    """An actor whose calls are their own answers."""

    def __init__(self, name):
        self.name = name

    @property
    def double(self):
        return self

    def remote(self, number):
        return self.name, 2 * number


def actor(*errors, **settings):
    """An actor whose calls raise these first, and the seconds that were slept between them."""
    left, slept, names = list(errors), [], itertools.count()

    def get(answer, timeout):
        if left:
            raise left.pop(0)
        return (*answer, timeout)

    settings = {"answer_seconds": 10.0, "patience_seconds": 600.0, **settings}
    made = NamedActor(
        lambda: Handle(next(names)), get=get, sleep=slept.append, uniform=lambda low, high: 1.0,
        **settings,
    )  # fmt: skip
    return made, slept


def test_a_call_is_repeated_while_the_actor_is_away():
    made, slept = actor(AWAY, RaySystemError("no network"), AWAY)
    assert made.call("double", 4, waits=5.0) == (0, 8, 15.0)
    assert slept == [0.05, 0.1, 0.2]
    assert made.failures == {"ActorUnavailableError": 2, "RaySystemError": 1}


def test_one_that_has_ended_is_replaced_or_ends_the_call():
    made, _ = actor(ActorDiedError())
    assert made.call("double", 4) == (1, 8, 10.0)
    made, slept = actor(ActorDiedError(), reconnects=False)
    with pytest.raises(ActorDiedError):
        made.call("double", 4)
    assert slept == []


def test_patience_ends():
    made, slept = actor(AWAY, AWAY, patience_seconds=0.0)
    with pytest.raises(ActorUnavailableError):
        made.call("double", 4)
    assert slept == []


def test_what_the_actor_raises_itself_is_not_repeated():
    made, slept = actor(ValueError("of the method"))
    with pytest.raises(ValueError, match="of the method"):
        made.call("double", 4)
    assert slept == []
