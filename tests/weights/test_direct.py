"""Weights that go from the learner's memory into a sampler's by Ray's direct transport."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ray

from rllib_llm.weights import direct
from rllib_llm.weights.direct import DirectSnapshot, has_nixl
from rllib_llm.weights.flat_buffer import FlatBuffer
from rllib_llm.weights.published import WeightsLostError
from rllib_llm.weights.publisher import WeightsPublisher
from tests.algorithms import tiny_runs as tiny
from tests.learners import tiny_learners
from tests.weights.direct_processes import NUM_BYTES, Learner, Sampler
from tests.weights.test_broadcast import LocalGroup

NIXL_MARKS = (
    pytest.mark.nixl,
    pytest.mark.skipif(not has_nixl(), reason="NIXL is not installed: `make test-nixl` does it"),
)
TRANSPORTS = ["in_metadata", pytest.param("nixl", marks=NIXL_MARKS)]


def with_nixl(test):
    """Needs the package."""
    for mark in NIXL_MARKS:
        test = mark(test)
    return test


def expected(version):
    return [version, version, NUM_BYTES, [version + 0.5] * 3, [version + 0.5] * 3]


@pytest.fixture
def start(ray_session):
    """Starts one of the processes."""
    actors = []

    def start_one(cls, transport, **kwargs):
        actors.append(ray.remote(cls).options(num_cpus=0).remote(transport, **kwargs))
        return actors[-1]

    yield start_one
    for actor in actors:
        ray.kill(actor)


def put(learner, version):
    return ray.get(learner.put.remote(version))


@pytest.mark.slow  # three processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_other_processes_read_every_version_that_is_referred_to(start, transport):
    learner = start(Learner, transport)
    samplers = [start(Sampler, transport) for _ in range(2)]
    published = [put(learner, version) for version in range(3)]
    for version in (2, 0, 1):  # none is written over
        found = ray.get([sampler.receive.remote(published[version]) for sampler in samplers])
        assert found == 2 * [expected(version)]
    assert ray.get(samplers[0].received_bytes.remote()) == NUM_BYTES
    assert ray.get(learner.num_buffers.remote()) == (3, 3)
    del published
    deadline = time.monotonic() + 60  # the samplers have one in use
    while (left := ray.get(learner.num_buffers.remote())[1]) > 1:
        assert time.monotonic() < deadline, f"{left} buffers are referred to"
        time.sleep(0.1)
    published = [put(learner, version) for version in (3, 4)]  # into the two that are free
    for version in (3, 4):
        assert ray.get(samplers[1].receive.remote(published[version - 3])) == expected(version)
    assert ray.get(learner.num_buffers.remote()) == (3, 3)


@with_nixl
def test_readers_stay_connected(start):
    processes = learner, sampler = start(Learner, "nixl"), start(Sampler, "nixl")
    open_files = []
    for version in range(16):
        assert ray.get(sampler.receive.remote(put(learner, version))) == expected(version)
        open_files.append(ray.get([process.num_files.remote() for process in processes]))
    # Sockets of a connection for each read would be 12; Ray opens some now and then.
    assert max(last - first for first, last in zip(open_files[3], open_files[-1], strict=True)) < 8


@pytest.mark.slow  # waits between attempts
def test_a_transfer_that_fails_is_tried_again_and_given_up(start):
    learner = start(Learner, "in_metadata")
    sampler = start(Sampler, "in_metadata", max_attempts=3)
    ray.get(sampler.fail_next.remote(2))
    assert ray.get(sampler.receive.remote(put(learner, 7))) == expected(7)
    assert ray.get(sampler.failures.remote()) == {"failures/RayDirectTransportError": 2}
    ray.get(sampler.fail_next.remote(3))
    with pytest.raises(WeightsLostError, match="3 attempts failed, .* RayDirectTransportError"):
        ray.get(sampler.receive.remote(put(learner, 8)))
    assert ray.get(sampler.failures.remote()) == {"failures/RayDirectTransportError": 5}


@with_nixl
def test_a_learner_that_stops_costs_a_reader_its_timeout(start):
    learner = start(Learner, "nixl")
    impatient = start(Sampler, "nixl", timeout_seconds=1.0, max_attempts=2)
    pid, published = ray.get(learner.pid.remote()), put(learner, 1)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(WeightsLostError, match="2 attempts failed, .* GetTimeoutError"):
            ray.get(impatient.receive.remote(published))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ray.get(start(Sampler, "nixl").receive.remote(published)) == expected(1)


@with_nixl
def test_a_reader_that_dies_holds_nobody_up(start):
    learner, doomed, other = (start(cls, "nixl") for cls in (Learner, Sampler, Sampler))
    published = put(learner, 0)
    ray.get([doomed.receive.remote(published), other.receive.remote(published)])
    published = put(learner, 1)
    reading = doomed.receive.remote(published)
    ray.kill(doomed)
    assert ray.get(other.receive.remote(published)) == expected(1)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(reading)
    assert ray.get(other.receive.remote(put(learner, 2))) == expected(2)


@with_nixl
def test_a_learner_that_died_is_replaced(start):
    learner = start(Learner, "nixl")
    sampler = start(Sampler, "nixl", timeout_seconds=20.0, max_attempts=2)
    published = put(learner, 1)
    ray.kill(learner)
    with pytest.raises(WeightsLostError, match="2 attempts failed"):
        ray.get(sampler.receive.remote(published))
    kinds = ray.get(sampler.failures.remote())
    assert set(kinds) <= {"failures/RayDirectTransportError", "failures/OwnerDiedError"}
    assert sum(kinds.values()) == 2
    assert ray.get(sampler.receive.remote(put(start(Learner, "nixl"), 2))) == expected(2)


def test_the_store_takes_over(ray_session, monkeypatch):
    monkeypatch.setattr(direct, "has_nixl", lambda: False)
    publisher = WeightsPublisher(
        LocalGroup(tiny_learners.build(tiny.ppo())), shared_module=False, transport="nixl"
    )
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'rllib-llm\[nixl\]'"):
        publisher.publish(1)
    for published in (publisher.publish_again("no nixl"), publisher.publish(2)):
        assert isinstance(ray.get(published.ref[0]), FlatBuffer)


@with_nixl
def test_a_run_has_the_same_weights_as_through_the_store(ray_session):
    states = []
    for transport in ("store", "nixl"):
        config = (
            tiny.ppo()
            .learners(num_learners=1, num_cpus_per_learner=0.5)
            .env_runners(num_env_runners=2, num_cpus_per_env_runner=0.5)
            .weights(weights_transport=transport)
        )
        with tiny.built(config) as algorithm:
            tiny.train(algorithm, 2)
            snapshot = ray.get(algorithm.weights.published.ref[0])
            assert isinstance(snapshot, DirectSnapshot if transport == "nixl" else FlatBuffer)
            weights = algorithm.train()["weights"]
            assert (weights["republished"], weights["version"]) == (0, 3)
            assert algorithm.verify_weights() == {}
            states.append(tiny.weights(algorithm))
    tiny.assert_same_weights(*states)
