"""A run that cannot be placed says so before anyone waits for it."""

from __future__ import annotations

import time

import pytest
from ray import tune

from rllib_llm.algorithms import places
from rllib_llm.algorithms.grpo import GRPO
from rllib_llm.algorithms.places import (
    Reservation,
    check_nodes,
    first_without_place,
    processes,
    wait_for_places,
)
from rllib_llm.shared.errors import Problems
from tests.algorithms import tiny_runs as tiny


@pytest.mark.parametrize("bundles, nodes, whether", [
    ([{"CPU": 1}] * 3, [{"CPU": 2}], False),
    ([{"CPU": 1}] * 3, [{"CPU": 2}, {"CPU": 1}], True),
    ([{"CPU": 2}], [{"CPU": 1}, {"CPU": 1}], False),  # a process is on one node
    ([{"CPU": 1}, {"CPU": 1, "GPU": 1}], [{"CPU": 1, "GPU": 1}, {"CPU": 1}], True),
    ([{"CPU": 0.5, "GPU": 0}] * 4, [{"CPU": 2}], True),
    ([{"CPU": 1, "TPU": 1}], [{"CPU": 8}], False),
    ([], [], True),
    # First fit would leave 2 and 1 CPUs on the nodes, and the last bundle without a place.
    ([{"CPU": n} for n in (4, 4, 3, 3, 3, 3)], [{"CPU": 10}, {"CPU": 10}], True),
    # The one that is wanted only on a labelled node goes there, and leaves the other for the rest.
    ([{"GPU": 1}, {"GPU": 1, "labelled": 1}], [{"GPU": 1, "labelled": 1}, {"GPU": 1}], True),
])  # fmt: skip
def test_processes_are_packed_onto_nodes(bundles, nodes, whether):
    assert (first_without_place(bundles, nodes) is None) == whether


def reserved(strategy: str = "PACK", **learners) -> Reservation:
    """Of a loop (1 CPU), two samplers (1 CPU, 1 GPU) and learners."""
    config = tiny.grpo().env_runners(num_env_runners=2, num_gpus_per_env_runner=1)
    config.learners(**learners)
    config.placement_strategy = strategy
    return Reservation.of(GRPO.default_resource_request(config), config)


HEAD = {"CPU": 8.0, "memory": 2.0**35, "node:__internal_head__": 1.0}
SMALL = {"CPU": 4.0, "GPU": 2.0}
LARGE = {"CPU": 32.0, "GPU": 8.0}


@pytest.mark.parametrize("strategy, learners, nodes, message", [
    ("PACK", {"num_learners": 6}, [HEAD, LARGE], None),
    ("PACK", {"num_learners": 4}, [HEAD, SMALL, SMALL, SMALL], None),
    # 8 GPUs in all, two on a node: the learner of 4 has no place, and is named.
    ("PACK", {"num_learners": 1, "num_gpus_per_learner": 4}, [HEAD] + [SMALL] * 4,
     "the bundle of a learner, 4 GPU, must fit into one node: the largest has 2 GPU"),
    # Each fits a node; with one of 5 on each, neither of 8 GPUs has room for the third.
    ("PACK", {"num_learners": 3, "num_gpus_per_learner": 5}, [HEAD, LARGE, LARGE],
     r"the 6 bundles of one trial must find places together \(PACK\) on 3 nodes: none is left for "
     "that of a learner, 5 GPU; the largest node has 8 GPU in all"),
    ("STRICT_PACK", {"num_learners": 6}, [LARGE], None),
    ("STRICT_PACK", {"num_learners": 6}, [SMALL] * 4,
     r"all processes \(placement_strategy: STRICT_PACK\), 3 CPU, 8 GPU, must fit into one node: "
     "the largest has 4 CPU, 2 GPU"),
    ("STRICT_SPREAD", {"num_learners": 1}, [HEAD, LARGE, LARGE, LARGE], None),
    ("STRICT_SPREAD", {"num_learners": 1}, [LARGE] * 3,
     "none is left for that of the main process, 1 CPU; the largest node has 32 CPU in all"),
])  # fmt: skip
def test_every_bundle_of_a_trial_has_a_node(strategy, learners, nodes, message):
    reservation = reserved(strategy, **{"num_gpus_per_learner": 1, **learners})
    if message is None:
        check_nodes(reservation, nodes)
    else:
        with pytest.raises(Problems, match=message):
            check_nodes(reservation, nodes)


@pytest.mark.parametrize("cpus, learners, expected", [
    (None, {}, [1.0]),
    (0.25, {}, [0.25]),
    (0.5, {}, [0.5]),
    (2, {}, [2.0]),
    (0, {}, [1.0]),  # some resource has to be reserved
    # What someone says of the learner counts as well: it is in the same process.
    (0.5, {"num_cpus_per_learner": 0}, [0.5]),
    (0.5, {"num_cpus_per_learner": 3}, [3.0]),
    (0.5, {"num_learners": 1}, [0.5, 1.0]),
])  # fmt: skip
@pytest.mark.parametrize("as_mapping", [False, True])  # Tune gives a dict of a YAML file's settings
def test_the_main_process_reserves_the_cpus_that_were_set(cpus, learners, expected, as_mapping):
    config = tiny.grpo().learners(**learners)
    if cpus is not None:
        config.num_cpus_for_main_process = cpus
    settings = config.to_dict() if as_mapping else config
    request = GRPO.default_resource_request(settings)
    assert [bundle["CPU"] for bundle in request.bundles] == expected


def test_bundles_are_named_by_their_process():
    with_gpus = {"num_learners": 1, "num_gpus_per_learner": 1}
    assert reserved(**with_gpus).uses == (
        "the main process", "a sampler", "a sampler", "a learner",
    )  # fmt: skip
    one_process = reserved(num_learners=0, num_gpus_per_learner=1)
    assert one_process.bundles[0] == {"CPU": 1.0, "GPU": 1.0}
    assert one_process.uses == ("the main process", "a sampler", "a sampler")


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


def test_further_environments_have_bundles_of_their_own():
    """Of 2 samplers, 1 of evaluation's, 1 of each of two environments and 1 learner, 6 processes
    besides the main one; evaluation's samplers have what its config asks for them."""
    config = tiny.grpo().env_runners(num_env_runners=2).learners(num_learners=1)
    config.evaluation(evaluation_interval=1, evaluation_num_env_runners=1,
                      evaluation_config={"num_cpus_per_env_runner": 2})  # fmt: skip
    config.sampling(eval_envs={"easy": {}, "hard": {"num_cpus_per_env_runner": 3}})
    cpus = [1, 1, 2, 2, 3, 1]
    assert [process["CPU"] for process in processes(config)] == cpus
    request = GRPO.default_resource_request(config)
    assert [bundle["CPU"] for bundle in request.bundles] == [1, *cpus]


@pytest.mark.slow  # a trial of four processes
@pytest.mark.usefixtures("ray_session")
def test_samplers_of_further_environments_start_under_tune(tmp_path):
    """The trial has 4 CPUs, of which each process takes one: the tests' Ray has no more."""
    config = tiny.grpo(num_epochs=1).evaluation(
        evaluation_interval=1, evaluation_duration=3, evaluation_num_env_runners=1
    )
    config.sampling(eval_envs={"easy": {"evaluation_duration": 3}, "hard": {}})
    results = tune.Tuner(
        "GRPO",
        param_space=config,
        run_config=tune.RunConfig(
            stop={"training_iteration": 1}, storage_path=str(tmp_path), verbose=0
        ),
    ).fit()
    assert results.num_errors == 0
    assert {"scores", "easy/scores", "hard/scores"} <= results[0].metrics["eval"].keys()


@pytest.mark.usefixtures("ray_session")
def test_too_small_a_cluster_is_refused_when_the_algorithm_is_built():
    """The tests' Ray has 4 CPUs."""
    config = tiny.grpo().env_runners(num_env_runners=3).learners(num_learners=2)
    with pytest.raises(RuntimeError, match="with 5 CPU must fit into the cluster's 4 CPU"):
        config.build_algo()


@pytest.mark.usefixtures("ray_session")
def test_a_cluster_that_others_have_taken_is_refused_after_a_while(monkeypatch):
    import ray

    monkeypatch.setattr(places, "MAX_SECONDS_OCCUPIED", 1.0)

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
    left = r"what others have left of the cluster, (1 CPU|nothing)\."
    with pytest.raises(RuntimeError, match=left):
        wait_for_places(config)
    ray.kill(tenant)
    monkeypatch.setattr(places, "MAX_SECONDS_OCCUPIED", 60.0)
    wait_for_places(config)
