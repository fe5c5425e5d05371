"""Whether the cluster can hold a run's processes, asked before anyone waits for a place."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group

from rllib_llm.shared.ray_compat import free_by_node

MAX_SECONDS_OCCUPIED = 60.0  # until processes of a run that just ended have left
SECONDS_BETWEEN_LOOKS = 0.5


class NoPlaceError(RuntimeError):
    """The cluster is too small for the processes of the run, or taken by others."""


def require_places(config: Any) -> None:
    """Checks that every process of a run, by its `AlgorithmConfig`, finds its resources.

    Under Tune there is nothing to check: the trial starts when its resources are reserved.

    Raises:
        NoPlaceError: some would wait for ever, saying what is asked and what the cluster has.
    """
    bundles = processes(config)
    if not bundles:
        return
    if not ray.is_initialized():
        ray.init()
    if get_current_placement_group() is not None:
        return
    totals = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not fits(bundles, totals):
        raise NoPlaceError(
            f"{_ask(bundles)} must fit into the cluster's {_sum(totals)}: the others would wait "
            "for ever. Lower num_env_runners, evaluation_num_env_runners, num_learners or "
            "num_cpus_per_..., or give Ray more: ray.init(num_cpus=...), more nodes. On a cluster "
            "that grows by itself, run under tune.Tuner, which asks for the nodes."
        )
    _wait_for_others(bundles)


def processes(config: Any) -> list[dict[str, float]]:
    """Resources of each process that is started besides the driver's."""
    sampler = {
        "CPU": config.num_cpus_per_env_runner,
        "GPU": config.num_gpus_per_env_runner,
        **config.custom_resources_per_env_runner,
    }
    cpus, gpus = config.num_cpus_per_learner, config.num_gpus_per_learner
    learner = {
        "CPU": int(not gpus) if cpus == "auto" else cpus,  # as RLlib's LearnerGroup
        "GPU": gpus,
        **(config.custom_resources_per_learner or {}),
    }
    num_samplers = 0
    if config.is_online:
        # RLlib starts evaluation samplers also where no `evaluation_interval` is set.
        num_samplers = config.num_env_runners + config.evaluation_num_env_runners
    return [sampler] * num_samplers + [learner] * config.num_learners


def _wait_for_others(bundles: Sequence[Mapping[str, float]]) -> None:
    start = time.monotonic()
    while not fits(bundles, free := free_by_node()):
        if time.monotonic() - start > MAX_SECONDS_OCCUPIED:
            raise NoPlaceError(
                f"{_ask(bundles)} must fit into what others have left of the cluster, {_sum(free)}"
                f", for {MAX_SECONDS_OCCUPIED:.0f} s now. Stop other algorithms (.stop()), wait "
                "for other jobs, or run under tune.Tuner, which waits."
            )
        time.sleep(SECONDS_BETWEEN_LOOKS)


def fits(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Whether all bundles find a node, the largest placed first, each on the first with room."""
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda b: (b.get("GPU", 0), b.get("CPU", 0)), reverse=True):
        needed = {name: amount for name, amount in bundle.items() if amount > 0}
        for node in free:
            if all(node.get(name, 0.0) + 1e-9 >= amount for name, amount in needed.items()):
                for name, amount in needed.items():
                    node[name] -= amount
                break
        else:
            return False
    return True


def _ask(bundles: Sequence[Mapping[str, float]]) -> str:
    return f"{len(bundles)} samplers, evaluation samplers and learners with {_sum(bundles)}"


def _sum(parts: Sequence[Mapping[str, float]]) -> str:
    """Totals as text, such as "3 CPU, 1 GPU"."""
    names = sorted({name for part in parts for name in part if _is_counted(name)})
    totals = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
    return ", ".join(f"{total:g} {name}" for name, total in totals.items() if total) or "nothing"


def _is_counted(name: str) -> bool:
    return name not in ("memory", "object_store_memory") and not name.startswith("node:")
