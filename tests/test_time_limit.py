"""A limit learnt from answers: generous, in proportion, and none where none is wanted."""

from __future__ import annotations

from rllib_llm.time_limit import TimeLimit


def test_a_number_or_none_is_what_it_says():
    for setting in (3.0, None):
        limit = TimeLimit(setting)
        limit.record(1000.0)
        assert limit.seconds(8) == setting


def test_auto_is_ten_times_the_slowest_answer():
    limit = TimeLimit("auto")
    assert limit.seconds() == 1800.0
    limit.record(2.0, size=4)
    assert limit.seconds(4) == 120.0  # 20 s would be too strict for what a network does
    limit.record(30.0, size=4)
    limit.record(1.0, size=4)
    assert limit.seconds(4) == limit.seconds(1) == 300.0
    assert limit.seconds(8) == 600.0  # twice the prompts, when another's part is taken over
