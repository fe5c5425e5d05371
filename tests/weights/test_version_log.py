"""Who is fenced off, what is kept, and what a receiver is told."""

from __future__ import annotations

import pytest

from rllib_llm.weights.coordinator import Announced, VersionLog
from rllib_llm.weights.published import PublishedWeights


class Clock:
    """Nanoseconds, by hand."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __call__(self) -> int:
        return int(self.seconds * 1e9)


def test_epochs_grow_also_across_a_log_that_lost_its_memory():
    clock = Clock(100)
    log = VersionLog(clock=clock)
    first, second = log.begin_epoch(), log.begin_epoch()
    assert (first, second) == (100_000_000, 100_000_001)  # microseconds
    clock.seconds = 101
    assert VersionLog(clock=clock).begin_epoch() == 101_000_000 > second


def test_a_later_publisher_fences_off_the_earlier_and_may_count_from_lower():
    log = VersionLog()
    old = log.begin_epoch()
    assert log.announce(PublishedWeights(7, epoch=old)) is Announced.ACCEPTED
    new = log.begin_epoch()
    assert log.latest().version == 7  # until the new one publishes, the old weights stand
    assert log.announce(PublishedWeights(3, epoch=new)) is Announced.ACCEPTED
    assert log.announce(PublishedWeights(8, epoch=old)) is Announced.FENCED
    assert log.latest().version == 3
    assert log.newer(after=(old, 7)).version == 3


def test_a_question_that_is_answered_too_late_fences_off_nobody():
    log = VersionLog()
    epoch = log.begin_epoch()
    log.announce(PublishedWeights(1, epoch=epoch))
    log.begin_epoch()  # of a publisher that asked thrice
    assert log.announce(PublishedWeights(2, epoch=epoch)) is Announced.ACCEPTED


def test_within_an_epoch_versions_grow_and_saying_it_twice_does_no_harm():
    log = VersionLog()
    epoch = log.begin_epoch()
    head = PublishedWeights(4, epoch=epoch)
    assert [log.announce(head), log.announce(head)] == [Announced.ACCEPTED] * 2
    assert log.announce(PublishedWeights(4, epoch=epoch)) is Announced.STALE
    assert log.announce(PublishedWeights(3, epoch=epoch)) is Announced.STALE
    assert log.latest() == head
    assert log.stats()["num_versions"] == 1


def test_an_empty_log_believes_whoever_heals_it_and_fences_as_before():
    log = VersionLog(clock=Clock(0))
    assert log.announce(PublishedWeights(9, epoch=50)) is Announced.ACCEPTED
    assert log.announce(PublishedWeights(99, epoch=49)) is Announced.FENCED
    assert log.begin_epoch() == 51


@pytest.mark.parametrize("keep", [1, 3])
def test_the_last_versions_are_kept(keep):
    log = VersionLog(keep)
    for version in range(5):
        log.announce(PublishedWeights(version, num_bytes=10))
        assert log.stats()["num_versions"] == min(keep, version + 1)
    assert log.stats()["num_bytes"] == 10 * keep


def test_lost_weights_are_not_given_out_and_can_be_put_again_under_another_key():
    log = VersionLog(keep=2)
    one, two = PublishedWeights(1), PublishedWeights(2)
    log.announce(one)
    log.announce(two)
    log.report_lost(two.key)
    assert log.latest() == one
    assert log.newer(after=two.order) is None  # nobody goes back
    assert log.announce(two) is Announced.LOST
    again = PublishedWeights(2)
    assert log.announce(again) is Announced.ACCEPTED
    assert log.latest() == again
    assert log.stats() == {"num_versions": 2, "num_bytes": 0, "num_lost": 0}


def test_a_report_on_weights_that_are_gone_is_forgotten():
    log = VersionLog(keep=1)
    old = PublishedWeights(1)
    log.announce(old)
    log.announce(PublishedWeights(2))
    log.report_lost(old.key)
    assert log.stats()["num_lost"] == 0


def test_newer_asks_for_a_version_and_for_what_comes_after():
    log = VersionLog()
    assert log.newer() is None
    head = PublishedWeights(5, epoch=2)
    log.announce(head)
    assert log.newer(5) == head
    assert log.newer(6) is None
    assert log.newer(after=(2, 4)) == head == log.newer(after=(1, 9))
    assert log.newer(after=(2, 5)) is None
