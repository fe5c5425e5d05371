"""Weights reach a sampler once per publication, whatever their version says."""

from __future__ import annotations

import pytest
import ray
import torch

from rllib_llm.weights.broadcast import PublishedWeights, WeightsPublisher, WeightsReceiver
from rllib_llm.weights.flat_buffer import pack
from tests.algorithms.tiny_runs import ppo
from tests.learners import tiny_learners


def published(version, value, key=None):
    ref = ray.put(pack({"x": torch.full((3,), float(value))}))
    return PublishedWeights(version, key or f"{version}:{value}", (ref,))


class Module:
    """Notes what it was given."""

    def __init__(self):
        self.loaded = []

    def load(self, tensors):
        self.loaded.append(float(tensors["x"][0]))


def test_every_publication_is_loaded_once(ray_session):
    receiver, module = WeightsReceiver(), Module()
    assert receiver.version == -1
    first, second = published(0, 10), published(1, 11)
    for weights in (first, first, second, second):
        receiver.ensure(weights, module.load)
    assert module.loaded == [10, 11]
    assert receiver.version == 1
    assert receiver.num_bytes == 64  # 12 bytes, aligned


def test_a_lower_version_and_the_same_version_again_are_loaded(ray_session):
    receiver, module = WeightsReceiver(), Module()
    receiver.ensure(published(5, 50), module.load)
    receiver.ensure(published(2, 20), module.load)
    assert receiver.version == 2
    receiver.ensure(published(2, 21), module.load)  # restored: same count, other weights
    assert module.loaded == [50, 20, 21]


def test_a_load_that_fails_is_tried_again(ray_session):
    receiver, module = WeightsReceiver(), Module()

    def fail(tensors):
        raise RuntimeError("no memory")

    weights = published(1, 10)
    with pytest.raises(RuntimeError, match="no memory"):
        receiver.ensure(weights, fail)
    assert receiver.version == -1
    receiver.ensure(weights, module.load)
    assert module.loaded == [10]


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
    WeightsReceiver().ensure(weights, received.update)
    assert weights.version == 4 and weights.num_bytes > 0
    assert received.keys() == {name for name in before if name.startswith("model.")}
    for name, tensor in received.items():
        assert torch.equal(tensor, before[name]), name


def test_a_shared_module_needs_no_transfer_but_every_publication_is_new():
    publisher = WeightsPublisher(LocalGroup(None), shared_module=True)
    one, two = publisher.publish(1), publisher.publish(1)
    assert one.ref == () and one.num_bytes == 0
    assert one.key != two.key
