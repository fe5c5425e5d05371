"""Whether a ledger that gives no answer hangs."""

from __future__ import annotations

from rllib_llm.rollouts.streaming.client import Silence


class Starved:
    """Seconds without a core at each look, as a test says."""

    def __init__(self, seconds):
        self.seconds = seconds

    def take(self):
        return self.seconds.pop(0)


def silence(pids, seconds):
    """Of an actor with these processes at each look."""
    pids, seconds = list(pids), list(seconds)
    return Silence(10.0, lambda: pids.pop(0), lambda watched: Starved(seconds))


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
