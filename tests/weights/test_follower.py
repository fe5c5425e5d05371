"""Following a run from outside: nothing before the first weights, swaps between batches only."""

from __future__ import annotations

import time

import pytest
import torch

from rllib_llm.weights.flat_buffer import TicketError, pack, unpack
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.receiver import PAUSE_SECONDS, WeightsFollower, WeightsReceiver
from tests.weights.fakes import Coordinator, Store

LONG = 60.0  # seconds that nothing here takes


class Run:
    """A coordinator, a store, and a model that notes what was loaded into it."""

    def __init__(self):
        self.coordinator, self.store = Coordinator(keep=3), Store()
        self.loaded = []
        self.epoch = self.coordinator.begin_epoch()
        self.receiver = WeightsReceiver(get=self.store.get, sleep=lambda seconds: None)
        self.follower = WeightsFollower(
            self.coordinator, self.load, receiver=self.receiver, wait_seconds=0.05
        )

    load_error = None

    def load(self, flat):
        if self.load_error is not None:
            raise self.load_error
        self.loaded.append(float(unpack(flat)["x"][0]))

    def publish(self, version, epoch=None):
        ref = self.store.put(pack({"x": torch.full((3,), float(version))}))
        published = PublishedWeights(version, ref=(ref,), epoch=epoch or self.epoch)
        self.coordinator.announce(published)
        return published

    def arrives(self, version):
        """Waits until the thread has fetched it."""
        deadline = time.monotonic() + LONG
        while self.follower.newest is None or self.follower.newest.version != version:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return True


@pytest.fixture
def run():
    run = Run()
    yield run
    run.follower.stop()


def test_nothing_is_used_before_something_came(run):
    with pytest.raises(TimeoutError, match="no weights of version 0"):
        run.follower.wait_for_weights(timeout=0.05)
    assert run.loaded == [] and run.follower.in_use is None
    run.publish(4)
    assert run.follower.wait_for_weights(timeout=LONG).version == 4
    assert run.loaded == [4]
    with pytest.raises(TimeoutError, match="no weights of version 5"):
        run.follower.wait_for_weights(5, timeout=0.05)


def test_weights_change_at_a_swap_only_and_to_the_latest_that_arrived(run):
    run.publish(1)
    run.follower.wait_for_weights(timeout=LONG)
    run.follower.start()
    for version in (2, 3):
        run.publish(version)
        assert run.arrives(version)
    assert run.loaded == [1]
    assert run.follower.metrics()["versions_behind"] == 2
    assert run.follower.swap() and not run.follower.swap()
    assert run.loaded == [1, 3]
    metrics = run.follower.metrics()
    assert (metrics["version"], metrics["versions_behind"], metrics["skips"]) == (3, 0, 1)
    assert metrics["bytes"] == 64


def test_what_was_prepared_is_loaded_at_the_swap(run):
    prepared = []

    def prepare(flat):
        prepared.append(flat)
        return lambda: run.load(flat)

    follower = WeightsFollower(
        run.coordinator, lambda use: use(), prepare=prepare, receiver=run.receiver,
        wait_seconds=0.05,
    )  # fmt: skip
    run.follower = follower
    run.publish(1)
    follower.wait_for_weights(timeout=LONG)
    follower.start()
    run.publish(2)
    assert run.arrives(2)
    assert len(prepared) == 2 and run.loaded == [1]
    assert follower.swap() and run.loaded == [1, 2]
    assert follower.metrics()["bytes"] == 64


def test_an_error_while_weights_are_prepared_is_raised_at_the_next_swap(run):
    def prepare(flat):
        raise OSError("mremap: no memory")

    run.follower = WeightsFollower(
        run.coordinator, run.load, prepare=prepare, receiver=run.receiver, wait_seconds=0.05
    )
    run.follower.start()
    run.publish(1)
    for _ in range(2):
        with pytest.raises(OSError, match="no memory"):
            run.follower.wait_for_weights(timeout=LONG)
    assert run.follower.in_use is None


def test_after_half_a_load_no_version_is_in_use_and_the_next_swap_tries_again(run):
    run.publish(1)
    run.follower.wait_for_weights(timeout=LONG)
    run.follower.start()
    run.publish(2)
    assert run.arrives(2)
    run.load_error = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        run.follower.swap()
    assert run.follower.in_use is None
    run.load_error = None
    assert run.follower.swap() and run.follower.in_use.version == 2
    assert run.loaded == [1, 2]


def test_a_restored_run_goes_back_and_its_predecessor_is_not_listened_to(run):
    run.publish(9)
    run.follower.wait_for_weights(timeout=LONG)
    new = run.coordinator.begin_epoch()
    run.publish(2, epoch=new)
    run.publish(10)  # of the run that was fenced off
    run.follower.start()
    assert run.arrives(2)
    run.follower.swap()
    assert run.loaded == [9, 2]


def test_lost_weights_are_reported_and_their_replacement_is_loaded(run):
    lost = run.publish(1)
    run.store.lost.add(lost.ref[0])
    with pytest.raises(TimeoutError):
        run.follower.wait_for_weights(timeout=0.1)
    assert run.coordinator.log.stats()["num_lost"] == 1
    run.publish(1)
    assert run.follower.wait_for_weights(timeout=LONG).version == 1
    assert run.follower.metrics()["failures/ObjectLostError"] == 1


def test_lost_weights_do_not_take_a_receiver_back_to_older_ones(run):
    run.publish(1)
    run.publish(2)
    run.follower.wait_for_weights(timeout=LONG)
    run.coordinator.report_lost(run.coordinator.latest().key)
    assert run.coordinator.latest().version == 1
    run.follower.start()
    run.publish(3)
    assert run.arrives(3)
    run.follower.swap()
    assert run.loaded == [2, 3]


def test_weights_that_cannot_be_read_here_are_asked_for_again_now_and_then(run):
    """A ticket of somebody's own transport, say; what answers at once must not be asked without a
    pause, for that takes a processor."""
    asked = []

    def get(ref, timeout):
        asked.append(ref)
        raise TicketError("not on this machine")

    run.follower = WeightsFollower(
        run.coordinator, run.load, receiver=WeightsReceiver(get=get), wait_seconds=0.05
    )
    run.publish(1)
    run.follower.start()
    time.sleep(1.0)
    run.follower.stop()
    assert 1 <= len(asked) <= 1.0 / PAUSE_SECONDS + 1
