"""When a trial does what it is told: between iterations, and in which state it waits."""

from __future__ import annotations

import pytest

from rllib_llm.overseer.phases import Oversight, Phases


class ScriptedLink:
    """Stands for a `Link`: commands that a test puts in, answers that it reads; `waiting` is called
    when a trial waits and there is nothing."""

    def __init__(self):
        self.answers, self.is_open = [], True
        self._now, self._later = [], []

    def tell(self, name, **arguments):
        self._now.append({"name": name, "arguments": arguments})

    def later(self, name, **arguments):
        """Comes when the trial waits."""
        self._later.append({"name": name, "arguments": arguments})

    def next_command(self, timeout_s=0.0):
        if self._now or not timeout_s:
            return self._now.pop(0) if self._now else None
        self.is_open = bool(self._later)
        return self._later.pop(0) if self._later else None

    def answer(self, command, text, *, refused=False):
        self.answers.append((command["name"], "refused" if refused else "done", text))


def scale_samplers(num_samplers):
    if num_samplers > 2:
        raise ValueError(f"samplers={num_samplers} must be at most 2")
    return f"{num_samplers} samplers"


@pytest.fixture
def world():
    """(a trial's oversight, its link, what was told of its phases)"""
    said = []
    oversight = Oversight(Phases("between", said.append), scale_samplers)
    oversight.link = link = ScriptedLink()
    return oversight, link, said


def after(oversight, iteration):
    oversight.end_iteration(iteration)
    return oversight.after_iteration()


def test_without_commands_nothing_waits(world):
    orders, link, said = world
    assert after(orders, 1) == {}
    orders.before_iteration()
    assert (link.answers, said, orders.paused) == ([], [], False)


def test_a_paused_trial_waits_with_its_result_until_it_is_resumed(world):
    orders, link, said = world
    link.tell("pause")
    link.later("scale", samplers=2)
    link.later("scale", samplers=3)
    link.later("resume")
    assert after(orders, 4) == {}
    assert said == ["paused: rllib resume goes on"] and link.is_open and not orders.paused
    assert link.answers == [
        ("pause", "done", "paused after iteration 4"),
        ("scale", "done", "2 samplers"),
        ("scale", "refused", "samplers=3 must be at most 2"),
        ("resume", "done", "resumes after iteration 4"),
    ]


def test_a_paused_trial_gives_its_result_away_to_be_saved_and_stays_paused(world):
    orders, link, _ = world
    link.tell("pause")
    link.later("checkpoint")
    assert after(orders, 4) == {"should_checkpoint": True}
    assert orders.paused
    # Tune has saved it; asked for another one, there is nothing new to save.
    link.later("checkpoint")
    link.later("resume")
    orders.before_iteration()
    assert [name for name, *_ in link.answers] == ["pause", "checkpoint", "checkpoint", "resume"]
    assert after(orders, 5) == {}


@pytest.mark.parametrize("paused", [False, True])
def test_stop_ends_a_run_that_is_paused_too(world, paused):
    orders, link, _ = world
    if paused:
        link.tell("pause")
    link.tell("stop")
    assert after(orders, 4) == {"should_checkpoint": True, "stop_run": True}
    assert not orders.paused


def test_stop_reaches_a_run_that_waits_behind_its_result(world):
    orders, link, _ = world
    link.tell("pause")
    link.tell("checkpoint")
    assert after(orders, 4) == {"should_checkpoint": True}
    link.later("stop")
    assert orders.before_iteration() == {"stop_run": True}  # and no iteration 5
    assert orders.before_iteration() == {}


def test_a_trial_whose_link_is_closed_waits_for_nobody(world):
    orders, link, _ = world
    link.tell("pause")
    assert after(orders, 1) == {}
    assert not link.is_open
