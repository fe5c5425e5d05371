from __future__ import annotations

import pytest

from rllib_llm.overseer import phases
from rllib_llm.overseer.phases import Phases, diagnose, shares


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_to_the_time_that_passed():
    clock = Clock()
    phase = Phases("starting", clock=clock)
    clock.now += 2
    for seconds, name in ((3.0, "a"), (5.0, "b"), (0.25, "a")):
        with phase(name):
            clock.now += seconds
        phase.outside("between")
        clock.now += 0.5
    # starting 2, a 3 + 0.25, b 5, between 3 * 0.5
    assert phase.seconds() == {"starting": 2.0, "a": 3.25, "b": 5.0, "between": 1.5}
    assert sum(phase.seconds().values()) == clock.now - 100.0
    assert phase.took == {"a": 0.25, "b": 5.0}
    found = phase.report()
    assert (found["phase"], found["seconds_in_phase"]) == ("between", 0.5)
    assert sum(phase.lap().values()) == 11.75
    clock.now += 4
    assert phase.lap() == {"between": 4.0}


def test_a_phase_within_another_is_said_and_counts_as_the_outer_one():
    clock = Clock()
    phase = Phases("between", clock=clock)
    with phase("evaluating", "evaluating 8 completions"):
        clock.now += 1
        with phase("generating"):
            clock.now += 2
            phase.progress("3 of 64 tokens")
            assert phase.activity == "evaluating 8 completions, generating, 3 of 64 tokens"
            assert (phase.report()["phase"], phase.report()["seconds_in_phase"]) == (
                "evaluating", 3.0)  # fmt: skip
    assert phase.seconds() == {"between": 0.0, "evaluating": 3.0}
    assert phase.took == {"generating": 2.0, "evaluating": 3.0}
    phase.progress("of nothing")
    assert phase.activity == "between"


def test_a_phase_ends_with_an_exception():
    phase = Phases("between", clock=Clock())
    with pytest.raises(KeyError), phase("learning"):
        raise KeyError
    assert phase.activity == "between" and "learning" in phase.took


def test_a_phase_is_told_when_it_begins_and_its_progress_once_a_second():
    clock, told = Clock(), []
    phase = Phases("between", told.append, clock)
    with phase("sampling"):
        assert told == ["sampling"]
        with phase("generating"):
            step = phase.steps("of 6 tokens")
            for _ in range(5):
                step()
                clock.now += 0.5
    assert told[1:] == [f"sampling, generating, {i} of 6 tokens" for i in (3, 5)]


def test_waiting_is_split_by_what_was_waited_for():
    clock = Clock()
    phase = Phases("between", clock=clock)
    with phase("waiting"):
        clock.now += 10
    phase.split("waiting", {"completions": 6.0, "judges": 1.0})
    expected = {"between": 0.0, "waiting": 3.0, "completions": 6.0, "judges": 1.0}
    assert phase.seconds() == expected
    # Work that was done before anyone waited: in proportion.
    with phase("waiting"):
        clock.now += 4
    phase.split("waiting", {"completions": 30.0, "judges": 10.0})
    assert phase.seconds() == expected | {"completions": 9.0, "judges": 2.0}
    assert sum(shares(phase.seconds()).values()) == pytest.approx(1)


@pytest.mark.parametrize(("seconds", "bound", "setting"), [
    ({phases.FOR_JUDGES: 6, phases.LEARNING: 3, phases.FOR_COMPLETIONS: 1}, "judge",
     "reward function"),
    ({phases.FOR_TOOLS: 6, phases.LEARNING: 3, phases.FOR_COMPLETIONS: 1}, "judge",
     "tools"),
    ({phases.LEARNING: 6, phases.FOR_COMPLETIONS: 3}, "learner", "num_learners"),
    ({phases.FOR_COMPLETIONS: 6, phases.LEARNING: 3}, "sampler", "num_env_runners"),
    ({phases.PUBLISHING: 3, phases.FOR_WEIGHTS: 3, phases.LEARNING: 4}, "weights",
     "weights_transport"),
])  # fmt: skip
def test_a_diagnosis_names_who_is_waited_for_and_what_to_change(seconds, bound, setting):
    # Time between iterations and pauses is nobody's.
    found = diagnose({**seconds, phases.BETWEEN: 100.0, phases.PAUSED: 100.0})
    assert found.bound == bound
    assert setting in found.text
    assert found.share == pytest.approx(6 / sum(seconds.values()))


def test_a_diagnosis_has_the_words_of_the_phases_that_it_adds_up():
    found = diagnose({phases.FOR_COMPLETIONS: 5.0, phases.WAITING: 4.0,
                      phases.LEARNING: 3.0})  # fmt: skip
    words = "most time goes into waiting for completions and waiting for samplers; to change it"
    assert found.text.startswith(f"sampler-bound: {words}")


def test_the_largest_part_is_not_called_most_of_the_time():
    seconds = {phases.LEARNING: 25.0, phases.FOR_COMPLETIONS: 21.0, phases.BETWEEN: 27.0}
    text = diagnose(seconds).text
    assert text.startswith("learner-bound: the largest part of what can be changed goes into learn")


def test_nothing_is_said_of_nothing():
    assert diagnose({phases.STARTING: 5.0}).bound == ""
    found = diagnose({phases.STARTING: 12.0, phases.LEARNING: 3.0})
    assert (
        found.bound == "" and "starting took most of the time so far (12 s of 15 s)" in found.text
    )
    assert diagnose({phases.STARTING: 2.0, phases.LEARNING: 3.0}).bound == "learner"


def test_evaluating_and_saving_hold_a_run_up_as_well():
    found = diagnose({phases.EVALUATING: 300.0, phases.FOR_COMPLETIONS: 100.0,
                      phases.LEARNING: 18.0})  # fmt: skip
    assert (found.bound, round(found.share, 3)) == ("evaluation", round(300 / 418, 3))
    assert "evaluation_interval" in found.text
    found = diagnose({phases.SAVING: 3.0, phases.LEARNING: 1.0})
    assert (found.bound, found.share) == ("checkpoints", 0.75)
