"""A run that cannot be placed says so before anyone waits for it."""

from __future__ import annotations

import time

import pytest

from rllib_llm.algorithms import language_model_config
from rllib_llm.algorithms.language_model_config import NoPlaceError, fits, processes, require_places
from tests.algorithms import tiny_runs as tiny


@pytest.mark.parametrize("bundles, nodes, whether", [
    ([{"CPU": 1}] * 3, [{"CPU": 2}], False),
    ([{"CPU": 1}] * 3, [{"CPU": 2}, {"CPU": 1}], True),
    ([{"CPU": 2}], [{"CPU": 1}, {"CPU": 1}], False),  # a process is on one node
    ([{"CPU": 1}, {"CPU": 1, "GPU": 1}], [{"CPU": 1, "GPU": 1}, {"CPU": 1}], True),
    ([{"CPU": 0.5, "GPU": 0}] * 4, [{"CPU": 2}], True),
    ([{"CPU": 1, "TPU": 1}], [{"CPU": 8}], False),
    ([], [], True),
])  # fmt: skip
def test_processes_are_packed_onto_nodes(bundles, nodes, whether):
    assert fits(bundles, nodes) == whether


def test_all_processes_but_the_driver_s_are_counted():
    config = tiny.grpo().env_runners(num_env_runners=2, num_gpus_per_env_runner=0.5)
    config.learners(num_learners=2, num_gpus_per_learner=1)
    config.evaluation(evaluation_num_env_runners=3)
    sampler, learner = {"CPU": 1, "GPU": 0.5}, {"CPU": 0, "GPU": 1}
    for interval in (None, 1):
        config.evaluation(evaluation_interval=interval)
        assert processes(config) == [sampler] * 5 + [learner] * 2
    assert processes(tiny.sft()) == []
    assert processes(tiny.sft().learners(num_learners=1)) == [{"CPU": 1, "GPU": 0}]


@pytest.mark.usefixtures("ray_session")
def test_too_small_a_cluster_is_refused_when_the_algorithm_is_built():
    """The tests' Ray has 4 CPUs."""
    config = tiny.grpo().env_runners(num_env_runners=3).learners(num_learners=2)
    with pytest.raises(NoPlaceError, match="with 5 CPU must fit into the cluster's 4 CPU"):
        config.build_algo()


@pytest.mark.usefixtures("ray_session")
def test_a_cluster_that_others_have_taken_is_refused_after_a_while(monkeypatch):
    import ray

    monkeypatch.setattr(language_model_config, "MAX_SECONDS_OCCUPIED", 1.0)

    @ray.remote(num_cpus=3)
    class Tenant:
        def is_in(self):
            return True

    tenant = Tenant.remote()
    ray.get(tenant.is_in.remote())
    while ray.available_resources().get("CPU", 0) > 1:  # Ray says so after a while
        time.sleep(0.1)
    config = tiny.sft().learners(num_learners=2)
    # Nothing where a process of an earlier test has not left yet.
    left = r"what others have left of the cluster, (1 CPU|nothing), for 1 s"
    with pytest.raises(NoPlaceError, match=left):
        require_places(config)
    ray.kill(tenant)
    monkeypatch.setattr(language_model_config, "MAX_SECONDS_OCCUPIED", 60.0)
    require_places(config)
