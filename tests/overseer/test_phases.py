from __future__ import annotations

import pytest

from rllib_llm.overseer import diagnosis
from rllib_llm.overseer.diagnosis import PhaseClock, diagnose, shares


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_intervals_add_up_to_the_time_that_passed():
    clock = Clock()
    phases = PhaseClock("starting", clock)
    for seconds, phase in ((2.0, "a"), (3.0, "b"), (5.0, "a"), (0.25, "c")):
        clock.now += seconds
        phases.enter(phase)
    clock.now += 1.5
    # starting 2, a 3 + 0.25, b 5, c 1.5
    assert phases.seconds() == {"starting": 2.0, "a": 3.25, "b": 5.0, "c": 1.5}
    assert sum(phases.seconds().values()) == clock.now - 100.0
    assert (phases.phase, phases.seconds_in_phase) == ("c", 1.5)
    assert sum(phases.lap().values()) == 11.75
    clock.now += 4
    assert phases.lap() == {"c": 4.0}


def test_waiting_is_split_by_what_was_waited_for():
    clock = Clock()
    phases = PhaseClock("waiting", clock)
    clock.now += 10
    seconds = phases.enter("learning")
    phases.split("waiting", seconds, {"completions": 6.0, "judges": 1.0})
    assert phases.seconds() == {"waiting": 3.0, "learning": 0.0, "completions": 6.0, "judges": 1.0}
    # Work that was done before anyone waited: in proportion.
    phases.enter("waiting")
    clock.now += 4
    phases.split("waiting", phases.enter("learning"), {"completions": 30.0, "judges": 10.0})
    assert phases.seconds() == {"waiting": 3.0, "learning": 0.0, "completions": 9.0, "judges": 2.0}
    assert sum(shares(phases.seconds()).values()) == pytest.approx(1)


@pytest.mark.parametrize(("seconds", "bound", "setting"), [
    ({diagnosis.FOR_JUDGES: 6, diagnosis.LEARNING: 3, diagnosis.FOR_COMPLETIONS: 1}, "judge",
     "reward function"),
    ({diagnosis.FOR_TOOLS: 6, diagnosis.LEARNING: 3, diagnosis.FOR_COMPLETIONS: 1}, "judge",
     "tools"),
    ({diagnosis.LEARNING: 6, diagnosis.FOR_COMPLETIONS: 3}, "learner", "num_learners"),
    ({diagnosis.FOR_COMPLETIONS: 6, diagnosis.LEARNING: 3}, "sampler", "num_env_runners"),
    ({diagnosis.PUBLISHING: 3, diagnosis.FOR_WEIGHTS: 3, diagnosis.LEARNING: 4}, "weights",
     "weights_transport"),
])  # fmt: skip
def test_a_diagnosis_names_who_is_waited_for_and_what_to_change(seconds, bound, setting):
    # Time between iterations and pauses is nobody's.
    found = diagnose({**seconds, diagnosis.BETWEEN: 100.0, diagnosis.PAUSED: 100.0})
    assert found.bound == bound
    assert setting in found.text
    assert found.share == pytest.approx(6 / sum(seconds.values()))


def test_a_diagnosis_has_the_words_of_the_phases_that_it_adds_up():
    found = diagnose({diagnosis.FOR_COMPLETIONS: 5.0, diagnosis.WAITING: 4.0,
                      diagnosis.LEARNING: 3.0})  # fmt: skip
    words = "most time goes into waiting for completions and waiting for samplers; to change it"
    assert found.text.startswith(f"sampler-bound: {words}")


def test_the_largest_part_is_not_called_most_of_the_time():
    seconds = {diagnosis.LEARNING: 25.0, diagnosis.FOR_COMPLETIONS: 21.0, diagnosis.BETWEEN: 27.0}
    text = diagnose(seconds).text
    assert text.startswith("learner-bound: the largest part of what can be changed goes into learn")


def test_nothing_is_said_of_nothing():
    assert diagnose({diagnosis.STARTING: 5.0}).bound == ""
    found = diagnose({diagnosis.STARTING: 12.0, diagnosis.LEARNING: 3.0})
    assert (
        found.bound == "" and "starting took most of the time so far (12 s of 15 s)" in found.text
    )
    assert diagnose({diagnosis.STARTING: 2.0, diagnosis.LEARNING: 3.0}).bound == "learner"


def test_evaluating_and_saving_hold_a_run_up_as_well():
    found = diagnose({diagnosis.EVALUATING: 300.0, diagnosis.FOR_COMPLETIONS: 100.0,
                      diagnosis.LEARNING: 18.0})  # fmt: skip
    assert (found.bound, round(found.share, 3)) == ("evaluation", round(300 / 418, 3))
    assert "evaluation_interval" in found.text
    found = diagnose({diagnosis.SAVING: 3.0, diagnosis.LEARNING: 1.0})
    assert (found.bound, found.share) == ("checkpoints", 0.75)
