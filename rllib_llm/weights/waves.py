"""Nodes that want the same weights are let go in growing waves.

If all pull at once, every one of them pulls from the only node that has the weights. In waves of as
many nodes as there are whole copies each copy feeds one node at a time: log2(n) rounds, not n.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import ray

from rllib_llm.weights.published import PublishedWeights

POLL_SECONDS = 0.01
MAX_WAIT_SECONDS = 5.0  # a node before this one may have died


def may_pull(node: str, nodes: Sequence[str], holders: Collection[str]) -> bool:
    """Whether it is the turn of `node` among `nodes`, in their order, while `holders` have whole
    copies. Whoever is not among `nodes` need not wait."""
    lacking = [other for other in nodes if other not in holders]
    return node not in lacking or lacking.index(node) < max(1, len(holders))


def nodes_with_a_copy(ref: ray.ObjectRef) -> list[str]:
    """Ids of the nodes whose object store holds the whole object.

    Raises:
        GetTimeoutError: the owner of the object does not answer.
    """
    timeout_ms = int(1000 * MAX_WAIT_SECONDS)
    return ray.experimental.get_object_locations([ref], timeout_ms)[ref]["node_ids"]


def wait_for_turn(
    published: PublishedWeights,
    *,
    node: str,
    holders: Callable[[ray.ObjectRef], Collection[str]] = nodes_with_a_copy,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns when this node may pull, at the latest after `MAX_WAIT_SECONDS`."""
    deadline = clock() + MAX_WAIT_SECONDS
    while clock() < deadline and not may_pull(node, published.nodes, holders(published.ref[0])):
        sleep(POLL_SECONDS)
