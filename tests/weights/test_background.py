"""Publishing from a thread: the latest wins, a coordinator that forgot is told again."""

from __future__ import annotations

import time

import pytest
import torch
from ray.exceptions import GetTimeoutError

from rllib_llm.weights.background import BackgroundPublisher
from rllib_llm.weights.flat_buffer import unpack
from rllib_llm.weights.published import PublishedWeights
from tests.weights.fakes import Coordinator, Store

LONG = 60.0  # seconds that nothing here takes


@pytest.fixture
def parts():
    store, coordinator = Store(), Coordinator()
    publisher = BackgroundPublisher(coordinator, put=store.put, look_in_seconds=0.01)
    yield publisher, coordinator, store
    store.allow_put.set()
    publisher.stop()


def weights(value):
    return {"x": torch.full((4,), float(value))}


def seen(condition):
    """Waits for what the thread does."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return True


def test_a_snapshot_is_published_and_later_changes_of_the_weights_are_not(parts):
    publisher, coordinator, store = parts
    tensors = weights(1)
    publisher.submit(tensors, 5)
    tensors["x"].zero_()
    assert publisher.wait(LONG)
    head = coordinator.latest()
    assert (head.version, head.num_bytes) == (5, 64)
    assert store.objects[head.ref[0]][0][:4] == b"\x00\x00\x80?"  # 1.0 as float32


def test_the_latest_wins_and_what_it_replaced_is_counted(parts):
    publisher, coordinator, store = parts
    store.allow_put.clear()
    publisher.submit(weights(1), 1)
    assert store.putting.wait(LONG)  # the thread is at version 1 and is held up
    for version in (2, 3, 4):
        publisher.submit(weights(version), version)
    store.allow_put.set()
    assert publisher.wait(LONG)
    assert publisher.num_skipped == 2
    # Version 1 was in the other buffer and came through whole.
    first_floats = [float(torch.frombuffer(bytearray(data), dtype=torch.float32)[0])
                    for data, _ in store.objects.values()]  # fmt: skip
    assert first_floats == [1, 4]
    assert coordinator.latest().version == 4


def test_a_coordinator_that_lost_its_memory_is_told_again(parts):
    publisher, coordinator, store = parts
    publisher.submit(weights(1), 1)
    assert publisher.wait(LONG)
    coordinator.restart()
    assert seen(lambda: coordinator.latest() is not None)
    assert coordinator.latest().version == 1
    assert len(store.objects) == 1  # the bytes are still there


def test_an_epoch_that_could_not_be_begun_is_begun_with_the_next_weights(parts):
    publisher, coordinator, _ = parts
    publisher.submit(weights(1), 5)
    assert publisher.wait(LONG)
    coordinator.knows_no_epoch = True
    publisher.submit(weights(2), 2)  # the learner was restored
    assert seen(lambda: publisher.failures)
    publisher.submit(weights(3), 3)
    coordinator.knows_no_epoch = False
    assert seen(lambda: coordinator.latest().version == 3)


def test_weights_reported_lost_are_put_again_under_another_key(parts):
    publisher, coordinator, store = parts
    publisher.submit(weights(1), 1)
    assert publisher.wait(LONG)
    first = coordinator.latest()
    coordinator.report_lost(first.key)
    assert seen(lambda: coordinator.latest() is not None and publisher.num_republished)
    again = coordinator.latest()
    assert again.version == 1 and again.key != first.key
    assert publisher.num_republished == 1
    assert torch.equal(unpack(store.objects[again.ref[0]][1])["x"], weights(1)["x"])


def test_another_publisher_of_that_name_ends_this_one(parts):
    publisher, coordinator, _ = parts
    publisher.submit(weights(1), 1)
    assert publisher.wait(LONG)
    other = PublishedWeights(5, epoch=coordinator.begin_epoch())
    coordinator.log.announce(other)
    assert seen(lambda: publisher._error is not None)  # at the next look
    with pytest.raises(RuntimeError, match="weights_name='a_run' must have one publisher"):
        publisher.submit(weights(2), 2)
    assert coordinator.latest() == other


def test_an_error_that_ends_the_thread_is_raised_by_the_next_submit(parts):
    publisher, _, store = parts

    def put(value):
        raise MemoryError("no room")

    publisher._put = put
    publisher.submit(weights(1), 1)
    assert publisher.wait(LONG)
    with pytest.raises(MemoryError, match="no room"):
        publisher.submit(weights(2), 2)


def test_who_stops_ends_the_coordinator_unless_another_has_begun():
    coordinator = Coordinator()
    first, second = (BackgroundPublisher(coordinator, put=Store().put) for _ in range(2))
    first.stop()
    assert not coordinator.is_ended
    second.stop()
    assert coordinator.is_ended


def test_a_version_that_does_not_grow_begins_an_epoch(parts):
    publisher, coordinator, _ = parts
    for version, value in ((7, 70), (3, 30)):  # restored
        publisher.submit(weights(value), version)
        assert publisher.wait(LONG)
    old, new = dict.fromkeys(coordinator.announced)
    assert new.epoch > old.epoch
    assert coordinator.latest().version == 3


def test_weights_in_the_store_already_are_announced_as_they_are(parts):
    publisher, coordinator, store = parts
    publisher.announce(PublishedWeights(2, ref=("ref",)))
    assert publisher.wait(LONG)
    assert coordinator.latest().ref == ("ref",)
    assert store.objects == {}


def test_a_coordinator_that_does_not_answer_is_told_at_the_next_look(parts):
    publisher, coordinator, _ = parts
    coordinator.errors = [GetTimeoutError("restarting")] * 2
    publisher.submit(weights(1), 1)
    assert seen(lambda: coordinator.latest() is not None)
    assert publisher.metrics()["announce_failures/GetTimeoutError"] == 2
