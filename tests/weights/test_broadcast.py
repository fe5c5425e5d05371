"""Weights reach a sampler once per publication, whatever their version says."""

from __future__ import annotations

import time

import pytest
import ray
import torch
from ray.exceptions import ObjectLostError

from rllib_llm.weights.background import BackgroundPublisher
from rllib_llm.weights.flat_buffer import pack, unpack
from rllib_llm.weights.published import PublishedWeights, WeightsLostError
from rllib_llm.weights.publisher import WeightsPublisher
from rllib_llm.weights.receiver import WeightsReceiver
from tests.algorithms.tiny_runs import ppo
from tests.learners import tiny_learners
from tests.weights.fakes import Coordinator, Store


def published(version, value, key=None):
    ref = ray.put(pack({"x": torch.full((3,), float(value))}))
    return PublishedWeights(version, key or f"{version}:{value}", (ref,))


class Module:
    """Notes what it was given."""

    def __init__(self):
        self.loaded = []

    def load(self, flat):
        self.loaded.append(float(unpack(flat)["x"][0]))


def test_every_publication_is_loaded_once(ray_session):
    receiver, module = WeightsReceiver(), Module()
    assert receiver.version == -1
    with pytest.raises(WeightsLostError, match="none were loaded"):
        receiver.published_bytes()
    first, second = published(0, 10), published(1, 11)
    for weights in (first, first, second, second):
        receiver.receive(weights, module.load)
    assert module.loaded == [10, 11]
    assert receiver.version == 1
    metrics = receiver.metrics()
    assert metrics["bytes"] == 64  # 12 bytes, aligned
    assert metrics["gb_per_s"] == pytest.approx(
        64e-9 / (metrics["transfer_seconds"] + metrics["load_seconds"])
    )
    assert 0 <= metrics["age_seconds"] == pytest.approx(
        time.time() - second.published_at, abs=60
    )


def test_a_lower_version_and_the_same_version_again_are_loaded(ray_session):
    receiver, module = WeightsReceiver(), Module()
    receiver.receive(published(5, 50), module.load)
    receiver.receive(published(2, 20), module.load)
    assert receiver.version == 2
    receiver.receive(published(2, 21), module.load)  # restored: same count, other weights
    assert module.loaded == [50, 20, 21]


def test_versions_that_a_receiver_passed_over_are_counted(ray_session):
    receiver, module = WeightsReceiver(), Module()
    for version, num_skipped in ((3, 0), (4, 0), (7, 2), (5, 2), (6, 2), (8, 3)):
        receiver.receive(published(version, version), module.load)
        assert receiver.metrics()["skips"] == num_skipped


def test_a_load_that_fails_is_tried_again(ray_session):
    receiver, module = WeightsReceiver(), Module()

    def fail(flat):
        raise RuntimeError("no memory")

    weights = published(1, 10)
    with pytest.raises(RuntimeError, match="no memory"):
        receiver.receive(weights, fail)
    assert receiver.version == -1
    receiver.receive(weights, module.load)
    assert module.loaded == [10]


def test_after_half_a_load_no_version_is_in_use(ray_session):
    receiver, module = WeightsReceiver(), Module()
    first = published(1, 10)
    receiver.receive(first, module.load)

    def load_half(flat):
        module.loaded.append("half of 11")
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        receiver.receive(published(2, 11), load_half)
    assert receiver.version == -1 and receiver.in_use is None
    receiver.receive(first, module.load)  # it is not what the module holds
    assert module.loaded == [10, "half of 11", 10]
    assert receiver.version == 1


class LocalGroup:
    """A learner group with its learner in this process."""

    is_local = True

    def __init__(self, learner):
        self._learner = learner


def test_a_publication_holds_the_policy_without_critic_and_outlives_later_updates(ray_session):
    learner = tiny_learners.build(ppo())
    publisher = WeightsPublisher(LocalGroup(learner), shared_module=False)
    weights = publisher.publish(4)
    before = tiny_learners.parameters(learner)
    tiny_learners.update(learner, tiny_learners.judged(learner))
    received = {}
    WeightsReceiver().receive(weights, lambda flat: received.update(unpack(flat)))
    assert weights.version == 4 and weights.num_bytes > 0
    assert received.keys() == {name for name in before if name.startswith("model.")}
    for name, tensor in received.items():
        assert torch.equal(tensor, before[name]), name


def test_a_shared_module_needs_no_transfer_but_every_publication_is_new():
    publisher = WeightsPublisher(LocalGroup(None), shared_module=True)
    one, two = publisher.publish(1), publisher.publish(1)
    assert one.ref == () and one.num_bytes == 0
    assert one.key != two.key


def test_weights_that_are_gone_are_said_to_be(ray_session):
    def get(ref, timeout):
        raise ObjectLostError("ff" * 28, None, "here")

    receiver = WeightsReceiver(get=get, sleep=lambda seconds: None, max_attempts=3)
    with pytest.raises(WeightsLostError, match="weights 1 .* 3 attempts"):
        receiver.receive(published(1, 10), Module().load)
    assert receiver.version == -1
    assert receiver.metrics()["failures/ObjectLostError"] == 3


def test_a_checksum_travels_with_the_weights(ray_session):
    learner = tiny_learners.build(ppo())
    for checksum in (False, True):
        publisher = WeightsPublisher(LocalGroup(learner), shared_module=False, checksum=checksum)
        flat = ray.get(publisher.publish(1).ref[0])
        assert (flat.checksum is not None) == checksum


@pytest.mark.parametrize("shared_module", [True, False])
def test_whoever_follows_the_run_is_given_every_publication(ray_session, shared_module):
    store, coordinator = Store(), Coordinator()
    learner = tiny_learners.build(ppo())
    background = BackgroundPublisher(coordinator, put=store.put, look_in_seconds=0.01)
    publisher = WeightsPublisher(
        LocalGroup(learner), shared_module=shared_module, background=background
    )
    publisher.publish(3)
    assert background.wait(60)
    head = coordinator.latest()
    # What the samplers have been given is announced; where they need nothing, a snapshot is put.
    flat = store.get(head.ref[0], 1) if shared_module else ray.get(head.ref[0])
    assert head.version == 3
    state = unpack(flat)
    parameters = tiny_learners.parameters(learner)
    assert state and all(torch.equal(state[name], parameters[name]) for name in state)
    publisher.stop()
