"""Who may pull: as many nodes at a time as there are copies, nobody for ever."""

from __future__ import annotations

import pytest

from rllib_llm.weights.flat_buffer import pack
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.receiver import (
    MAX_WAIT_SECONDS,
    POLL_SECONDS,
    WeightsReceiver,
    may_pull,
    wait_for_turn,
)

NODES = tuple("abcdefgh")


@pytest.mark.parametrize(
    "source, turns",
    [
        ("learner", ["a", "bc", "defg", "h"]),  # 1, 2 and 4 copies
        ("c", ["a", "bd", "efgh"]),  # one of them has it already
    ],
)
def test_each_copy_feeds_one_node_at_a_time(source, turns):
    holders = {source}
    for turn in turns:
        let_go = [n for n in NODES if n not in holders and may_pull(n, NODES, holders)]
        assert let_go == list(turn)
        holders |= set(let_go)
    assert set(NODES) <= holders


def test_holders_and_strangers_need_not_wait_and_the_first_goes_before_there_is_a_copy():
    assert may_pull("c", NODES, {"c"}) and may_pull("x", NODES, set())
    assert [n for n in NODES if may_pull(n, NODES, set())] == ["a"]


class Time:
    """Copies appear while somebody waits; it takes no real time."""

    def __init__(self, holders):
        self.now, self.holders = 0.0, holders

    def sleep(self, seconds):
        self.now += seconds

    def look(self, ref):
        return next(holders for since, holders in self.holders if self.now >= since)

    def wait(self, node):
        published = PublishedWeights(1, ref=("ref",), nodes=NODES)
        wait_for_turn(
            published, node=node, holders=self.look, sleep=self.sleep, clock=lambda: self.now
        )
        return self.now


def test_a_node_waits_for_copies_but_not_for_ever():
    holders = [(0.3, {"learner", "a"}), (0.0, {"learner"})]
    assert Time(holders).wait("a") == 0
    assert Time(holders).wait("c") == pytest.approx(0.3, abs=2 * POLL_SECONDS)
    assert Time(holders).wait("d") == pytest.approx(MAX_WAIT_SECONDS, abs=0.02)


@pytest.mark.parametrize("nodes, waits", [((), 0), (("a",), 0), (("a", "b"), 1)])
def test_a_transfer_takes_turns_where_there_are_several_nodes(nodes, waits):
    asked = []
    receiver = WeightsReceiver(get=lambda ref, timeout: pack({}), wait_for_turn=asked.append)
    published = PublishedWeights(1, ref=("ref",), nodes=nodes)
    with receiver.open(lambda: published):
        pass
    assert asked == [published] * waits


def test_a_node_has_what_learners_publish_in_parts_when_it_has_all_parts():
    parts = {"x": {"learner", "a"}, "y": {"other learner"}}
    published = PublishedWeights(1, ref=("x", "y"), nodes=NODES)
    clock = Time([])

    def wait(node):
        wait_for_turn(
            published, node=node, holders=parts.__getitem__, sleep=clock.sleep,
            clock=lambda: clock.now,
        )  # fmt: skip
        return clock.now

    assert wait("a") == 0  # nobody has a whole copy: the first goes
    parts["y"].add("a")
    assert wait("b") == 0  # the copy that "a" has feeds one more
    assert wait("c") == pytest.approx(MAX_WAIT_SECONDS, abs=2 * POLL_SECONDS)
