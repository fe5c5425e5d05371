"""The coordinator as an actor: found by name, waited for, killed."""

from __future__ import annotations

import os
import signal
import time
import uuid

import pytest
import ray
import torch

from rllib_llm.weights.background import BackgroundPublisher
from rllib_llm.weights.coordinator import NAMESPACE, Announced, CoordinatorClient
from rllib_llm.weights.flat_buffer import unpack
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.receiver import WeightsFollower

LONG = 600.0  # seconds that nothing here takes


@pytest.fixture
def name(ray_session):
    name = f"run_{uuid.uuid4().hex}"
    yield name
    CoordinatorClient(name).close()


@ray.remote(num_cpus=0)
class Replica:
    """A receiver in a process of its own."""

    def __init__(self, name):
        self.value = None
        self.follower = WeightsFollower(CoordinatorClient(name), self.load)

    def load(self, flat):
        self.value = float(unpack(flat)["x"][0])

    def use(self, version):
        self.follower.wait_for_weights(version, timeout=LONG)
        return self.follower.in_use.version, self.value


def weights(value):
    return {"x": torch.full((4,), float(value))}


def test_the_name_finds_one_coordinator_which_fences_and_can_be_waited_for(name):
    one, other = CoordinatorClient(name), CoordinatorClient(name)
    assert other.latest() is None
    assert other.wait_for(timeout=0.01) is None
    old, new = one.begin_epoch(), other.begin_epoch()
    assert new > old
    head = PublishedWeights(3, epoch=new)
    assert other.announce(head) is Announced.ACCEPTED
    assert one.announce(PublishedWeights(5, epoch=old)) is Announced.FENCED
    assert one.wait_for(3, LONG) == head
    assert one.wait_for(4, 0.01) is None
    assert one.wait_for(timeout=0.01, after=head.order) is None
    one.report_lost(head.key)
    assert one.latest() is None


@pytest.mark.slow  # processes that die
def test_weights_reach_a_replica_also_after_the_coordinator_was_killed(name):
    client = CoordinatorClient(name)
    publisher, replica = BackgroundPublisher(client), Replica.remote(name)
    publisher.submit(weights(10), 1)
    assert ray.get(replica.use.remote(1)) == (1, 10)
    os.kill(client.stats()["pid"], signal.SIGKILL)
    publisher.submit(weights(20), 2)
    assert ray.get(replica.use.remote(2)) == (2, 20)
    assert publisher.wait(LONG)
    publisher.stop()
    ray.kill(replica)


class Impatient:
    """`ray.get` that gives up at once the first `num_timeouts` times."""

    def __init__(self, num_timeouts):
        self.num_timeouts = num_timeouts

    def __call__(self, ref, timeout):
        self.num_timeouts -= 1
        if self.num_timeouts >= 0:
            raise ray.exceptions.GetTimeoutError("scripted")
        return ray.get(ref, timeout=LONG)


@pytest.mark.slow  # waits for its time to pass
def test_the_publisher_has_a_stopped_coordinator_started_again(name):
    pid = CoordinatorClient(name).stats()["pid"]
    os.kill(pid, signal.SIGSTOP)
    client = CoordinatorClient(name, restarts_hung=True, get=Impatient(2))
    publisher = BackgroundPublisher(client)
    publisher.submit(weights(10), 1)
    assert publisher.wait(LONG)
    assert client.stats()["pid"] != pid
    assert client.latest().version == 1
    assert client.failures == {"GetTimeoutError": 2}
    publisher.stop()


def has_ended(name):
    try:
        ray.get_actor(name, NAMESPACE)
    except ValueError:
        return True
    return False


def test_the_coordinator_ends_with_its_last_publisher(ray_session):
    name = f"run_{uuid.uuid4().hex}"
    first, second = (BackgroundPublisher(CoordinatorClient(name)) for _ in range(2))
    first.stop()
    assert not has_ended(name)
    second.submit(weights(10), 1)
    assert second.wait(LONG)
    second.stop()
    deadline = time.monotonic() + LONG
    while not has_ended(name):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_coordinator_that_nobody_calls_ends(ray_session):
    name = f"run_{uuid.uuid4().hex}"
    client = CoordinatorClient(name, idle_seconds=0.2)
    assert client.latest() is None
    deadline = time.monotonic() + LONG
    while not has_ended(name):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_client_makes_a_new_coordinator_when_somebody_closed_it(name):
    client = CoordinatorClient(name, sleep=lambda seconds: None)
    client.announce(PublishedWeights(1, epoch=client.begin_epoch()))
    CoordinatorClient(name).close()
    deadline = time.monotonic() + LONG
    while client.latest() is not None:  # it may answer once more before it ends
        assert time.monotonic() < deadline
    assert client.failures["ActorDiedError"] >= 1
