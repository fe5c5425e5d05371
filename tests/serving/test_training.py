"""A run whose samplers ask a server that follows it learns what it would learn by itself."""

from __future__ import annotations

import contextlib

import pytest

from rllib_llm.serving.http_server import open_service
from rllib_llm.serving.settings import ServeSettings
from rllib_llm.serving.weight_sources import RunSource
from rllib_llm.weights.coordinator import CoordinatorClient
from tests.algorithms import tiny_runs as tiny
from tests.serving.tiny_server import DEADLINE_S, running

pytestmark = pytest.mark.usefixtures("ray_session")


@contextlib.contextmanager
def following(name: str):
    """The address of a server that follows the run of this name."""
    service = open_service(
        ServeSettings(model=tiny.MODEL, name="run", weights_wait_s=DEADLINE_S, engine_process=False)
    )
    with running(service) as address:
        source = RunSource(service, CoordinatorClient(name))
        source.start()
        try:
            yield address
        finally:
            source.stop()


def through(config, address: str, **settings):
    engine_settings = {"base_url": address, "endpoint": "tokens", **settings}
    return config.sampling(engine="openai", engine_settings=engine_settings)


@pytest.mark.slow  # two runs
def test_weights_learnt_through_a_server_are_those_of_a_run_in_one_process():
    evaluation = {"evaluation_interval": 1, "evaluation_duration": 6}
    sampled = {**evaluation, "evaluation_config": {"explore": True}}
    with tiny.built(tiny.grpo().evaluation(**sampled)) as algorithm:
        expected, weights = tiny.train(algorithm, 3), tiny.weights(algorithm)
        held_out = algorithm.eval_metrics
    name = "learnt_through_a_server"
    with following(name) as address:
        config = through(tiny.grpo().evaluation(**sampled), address).weights(name=name)
        with tiny.built(config) as algorithm:
            found = tiny.train(algorithm, 3)
            tiny.assert_same_weights(tiny.weights(algorithm), weights, atol=1e-6, rtol=1e-5)
            # On policy: each batch by the weights that were learnt last.
            assert algorithm.train()["train"]["staleness"] == 0
            assert algorithm.eval_metrics["iteration"] == 4
    for one, other in zip(found, expected, strict=True):
        assert one["objective"]["scores"] == other["objective"]["scores"]
        assert one["episode"] == other["episode"]
    assert held_out["scores"] is not None
