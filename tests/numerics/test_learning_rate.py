"""Learning-rate factors by optimiser update."""

from __future__ import annotations

import math

import pytest

from rllib_llm.numerics.learning_rate import learning_rate_factor
from rllib_llm.shared.errors import Problems


def factors(schedule, updates, *, warmup=0, total=None):
    return [
        learning_rate_factor(
            update, schedule=schedule, num_warmup_updates=warmup, num_total_updates=total
        )
        for update in updates
    ]


def test_warm_up_is_linear_and_never_0():
    assert factors("constant", range(5), warmup=3) == pytest.approx([0.25, 0.5, 0.75, 1, 1])


def test_linear_decay_reaches_0_and_stays_there():
    # 2 updates of warm-up, then 4 of decay.
    assert factors("linear", range(9), warmup=2, total=6) == pytest.approx(
        [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0, 0, 0]
    )


def test_cosine_decay():
    expected = [(1 + math.cos(math.pi * x / 4)) / 2 for x in range(5)]
    assert factors("cosine", range(5), total=4) == pytest.approx(expected)


def test_an_unknown_schedule_is_refused_by_name():
    with pytest.raises(Problems) as caught:
        factors("cubic", [0])
    assert (caught.value.problem.name, caught.value.problem.value) == ("lr_schedule", "cubic")


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_decay_needs_its_end(schedule):
    with pytest.raises(Problems) as caught:
        factors(schedule, [0])
    assert caught.value.problem.name == "lr_num_updates"
