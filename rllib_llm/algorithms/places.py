"""Where a run's processes find a place in the cluster: what they ask for, and what its nodes have.

Each process wants its resources on one node, so a cluster's totals say too little.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group

from rllib_llm.shared.errors import Problems, require
from rllib_llm.shared.ray_compat import free_by_node, resources_by_node

MAX_SECONDS_OCCUPIED = 60.0  # until processes of a run that just ended have left
SECONDS_BETWEEN_LOOKS = 0.5


def wait_for_places(config: Any) -> None:
    """Waits until every process of a run, by its `AlgorithmConfig`, finds its resources.

    Under Tune there is nothing to check: the trial starts when its resources are reserved.

    Raises:
        RuntimeError: some would wait for ever, saying what is asked and what the cluster has.
    """
    bundles = processes(config)
    if not bundles:
        return
    if not ray.is_initialized():
        ray.init()
    if get_current_placement_group() is not None:
        return
    totals = resources_by_node()
    if first_without_place(bundles, totals) is not None:
        raise RuntimeError(
            f"{_ask(bundles)} must fit into the cluster's {_totals(totals)}. Lower num_env_runners,"
            " num_learners or the resources of each; on a cluster that grows, use tune.Tuner."
        )
    start = time.monotonic()
    while first_without_place(bundles, free := free_by_node()) is not None:
        if time.monotonic() - start > MAX_SECONDS_OCCUPIED:
            raise RuntimeError(
                f"{_ask(bundles)} must fit into what others have left of the cluster, "
                f"{_totals(free)}. Stop other algorithms, or run under tune.Tuner, which waits."
            )
        time.sleep(SECONDS_BETWEEN_LOOKS)


def processes(config: Any) -> list[dict[str, float]]:
    """Resources of each process that is started besides the driver's, in the order in which the
    groups of samplers and the learners find their bundles in a trial's placement group."""
    cpus, gpus = config.num_cpus_per_learner, config.num_gpus_per_learner
    learner = {
        "CPU": int(not gpus) if cpus == "auto" else cpus,  # as RLlib's LearnerGroup
        "GPU": gpus,
        **(config.custom_resources_per_learner or {}),
    }
    samplers = [
        {
            "CPU": group.num_cpus_per_env_runner,
            "GPU": group.num_gpus_per_env_runner,
            **group.custom_resources_per_env_runner,
        }
        for group in config.sampler_configs()
        for _ in range(group.num_env_runners)
    ]
    return samplers + [learner] * config.num_learners


def first_without_place(
    bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]], *,
    apart: bool = False,
) -> int | None:  # fmt: skip
    """Index of the first bundle that no node has room for; None: all find a place.

    Those that the fewest nodes could hold come first, of these the largest, each on the first node
    with room, or, where that fails, all anew, each on the emptiest; some packing may be missed.
    `apart`: a node holds one bundle at most.
    """
    left = _first_left(bundles, nodes, apart, emptiest=False)
    if left is None or _first_left(bundles, nodes, apart, emptiest=True) is None:
        return None
    return left


def _first_left(
    bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]], apart: bool,
    emptiest: bool,
) -> int | None:  # fmt: skip
    free = [dict(node) for node in nodes]

    def rank(index: int) -> tuple[float, ...]:
        bundle = bundles[index]
        hosts = sum(holds(node, bundle) for node in nodes)
        return hosts, -bundle.get("GPU", 0), -bundle.get("CPU", 0)

    for index in sorted(range(len(bundles)), key=rank):
        places = [node for node in free if holds(node, bundles[index])]
        if not places:
            return index
        place = max(places, key=lambda node: node.get("CPU", 0.0)) if emptiest else places[0]
        for name, amount in bundles[index].items():
            place[name] = place.get(name, 0.0) - amount
        if apart:
            free.remove(place)
    return None


def holds(node: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    """Whether the node has all that the bundle asks for."""
    return all(node.get(name, 0.0) + 1e-9 >= amount for name, amount in bundle.items() if amount)


@dataclass(frozen=True)
class Reservation:
    """The bundles that Tune reserves for one trial, what each is for, and how they are placed."""

    bundles: tuple[dict[str, float], ...]
    uses: tuple[str, ...]
    strategy: str = "PACK"

    @classmethod
    def of(cls, request: Any, config: Any) -> Reservation:
        """From a `PlacementGroupFactory`, which has the main process first and learners last."""
        bundles = tuple(dict(bundle) for bundle in request.bundles)
        main = 0 if request.head_bundle_is_empty else 1
        learners = min(getattr(config, "num_learners", 0), len(bundles) - main)
        samplers = len(bundles) - main - learners
        uses = ("the main process",) * main + ("a sampler",) * samplers + ("a learner",) * learners
        return cls(bundles, uses, request.strategy)

    @property
    def totals(self) -> dict[str, float]:
        """The sum of all bundles."""
        return total_of(self.bundles)


def total_of(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each resource."""
    totals: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            totals[name] = totals.get(name, 0.0) + amount
    return totals


def check_nodes(reservation: Reservation, nodes: Sequence[Mapping[str, float]]) -> None:
    """Check that a cluster's nodes can hold one trial, each bundle on one node.

    Raises:
        Problems: a bundle is larger than every node, or not all find a place together.
    """
    bundles, uses = reservation.bundles, reservation.uses
    if reservation.strategy == "STRICT_PACK":
        bundles, uses = (reservation.totals,), ("all processes (placement_strategy: STRICT_PACK)",)
    for bundle, use in zip(bundles, uses, strict=True):
        name, largest = f"the bundle of {use}, {_named(bundle, bundle)},", _largest(nodes, bundle)
        require(any(holds(node, bundle) for node in nodes), name, ..., "fit into one node",
                f"the largest has {_named(largest, bundle)}",
                "Give Ray larger nodes, or lower what that process asks for")  # fmt: skip
    left = first_without_place(bundles, nodes, apart=reservation.strategy == "STRICT_SPREAD")
    if left is not None:
        bundle, largest = bundles[left], _largest(nodes, bundles[left])
        raise Problems(
            f"the {len(bundles)} bundles of one trial",
            f"find places together ({reservation.strategy}) on {len(nodes)} nodes",
            f"none is left for that of {uses[left]}, {_named(bundle, bundle)}; the largest node "
            f"has {_named(largest, bundle)} in all", "Give Ray nodes, or lower num_env_runners",
        )  # fmt: skip


def _largest(
    nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, float]
) -> Mapping[str, float]:
    """The node that comes nearest to holding `bundle`."""

    def covered(node: Mapping[str, float]) -> tuple[list[float], float]:
        asked = {name: node.get(name, 0.0) / n for name, n in bundle.items() if n}
        return sorted(min(1.0, share) for share in asked.values()), sum(asked.values())

    return max(nodes, key=covered, default={})


def _named(amounts: Mapping[str, float], bundle: Mapping[str, float]) -> str:
    """The resources that `bundle` asks for, of `amounts`: "1 CPU, 8 GPU"."""
    return ", ".join(f"{amounts.get(name, 0.0):g} {name}" for name, n in bundle.items() if n)


def _ask(bundles: Sequence[Mapping[str, float]]) -> str:
    return f"{len(bundles)} samplers, evaluation samplers and learners with {_totals(bundles)}"


def _totals(parts: Sequence[Mapping[str, float]]) -> str:
    """Totals as text, such as "3 CPU, 1 GPU"."""
    totals = sorted(total_of(parts).items())
    uncounted = {name for name, _ in totals if name.startswith("node:")}
    uncounted |= {"memory", "object_store_memory"}
    shown = [f"{n:g} {name}" for name, n in totals if n and name not in uncounted]
    return ", ".join(shown) or "nothing"
