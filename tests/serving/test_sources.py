"""A server that follows a run, and what it says while it cannot."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from rllib_llm.serving.weight_sources import RunSource
from rllib_llm.weights.flat_buffer import pack
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.receiver import WeightsReceiver
from tests.weights.fakes import Coordinator, Store

LONG = 60.0


class Service:
    """What a source asks of a server."""

    def __init__(self) -> None:
        self.settings = SimpleNamespace(weights_wait_s=LONG)
        self.is_ready, self.why_not_ready = True, ""
        self.loaded: list[int] = []
        self.transfers: list[tuple[int, float]] = []
        self.refuses: Exception | None = None

    def load(self, weights, *, epoch, version, source, num_bytes, transfer_seconds):
        if self.refuses is not None:
            raise self.refuses
        self.loaded.append(version)
        self.transfers.append((num_bytes, transfer_seconds))


class Run:
    def __init__(self) -> None:
        self.coordinator, self.store, self.service = Coordinator(keep=3), Store(), Service()
        self.coordinator.name = "run"
        self.epoch = self.coordinator.begin_epoch()
        self.source = RunSource(
            self.service, self.coordinator, retry_seconds=0.02,
            receiver=WeightsReceiver(get=self.store.get, sleep=lambda seconds: None),
        )  # fmt: skip

    def publish(self, version: int) -> None:
        ref = self.store.put(pack({"x": torch.full((3,), float(version))}))
        self.coordinator.announce(PublishedWeights(version, ref=(ref,), epoch=self.epoch))


def until(condition) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def run():
    run = Run()
    yield run
    run.source.stop()


def test_a_server_whose_weights_cannot_be_loaded_is_not_ready_until_they_are(run):
    run.source.start()
    assert not run.service.is_ready
    run.publish(1)
    until(lambda: run.service.is_ready)
    run.service.refuses = ValueError("weights of another model")
    run.publish(2)
    until(lambda: run.source.error is not None)
    assert not run.service.is_ready
    assert run.service.why_not_ready == "The weights of 'run' cannot be followed: ValueError."
    run.service.refuses = None  # the same weights are tried again
    until(lambda: run.service.is_ready)
    assert run.service.loaded == [1, 2] and run.source.error is None
    (num_bytes, seconds), _ = run.service.transfers
    assert num_bytes == 64 and seconds > 0  # 12 bytes, and up to the next place of a tensor


@pytest.mark.slow
def test_a_follower_that_died_is_begun_anew(run):
    """Its thread ends with any error that does not pass by itself, such as an export's own."""
    run.source.start()
    run.publish(1)
    until(lambda: run.service.is_ready)
    broken, sound = threading.Event(), run.coordinator.wait_for
    broken.set()

    def wait_for(*args, **kwargs):
        if broken.is_set():
            raise TypeError("not what was exported")
        return sound(*args, **kwargs)

    run.coordinator.wait_for = wait_for
    until(lambda: not run.service.is_ready)
    assert isinstance(run.source.error, TypeError)
    run.publish(2)
    time.sleep(0.1)
    assert not run.service.is_ready and run.service.loaded == [1]
    broken.clear()
    until(lambda: run.service.is_ready)
    assert run.service.loaded == [1, 2]
