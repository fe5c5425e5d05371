"""A script: a learner's node publishes to others, at once and in waves; says who sent how much."""

from __future__ import annotations

import json

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster

from benchmarks.weights.publish import CHUNK_BYTES, chunks_sent, start_cluster
from rllib_llm.weights.flat_buffer import FlatBuffer, Slot, unpack
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.receiver import WeightsReceiver, nodes_with_a_copy

NUM_NODES = 6  # beside the learner's
NUM_VERSIONS = 3
VERSIONS = range(1, NUM_VERSIONS + 1)
NUM_BYTES = 39 * 2**20  # and a header: 8 messages
STORE_BYTES = 160 * 2**20


@ray.remote(num_cpus=0)
class Receiver:
    """A sampler on a node."""

    def __init__(self):
        self.receiver = WeightsReceiver()

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def receive(self, published: PublishedWeights) -> int:
        """The number that all its bytes are."""
        found = []
        self.receiver.receive(published, lambda flat: found.extend(unpack(flat)["x"].aminmax()))
        low, high = found
        assert low == high
        return int(low)


def publish(receivers: list, beside: list, nodes: tuple[str, ...], cluster: Cluster) -> dict:
    """What arrived, and how many whole copies the learner's node and the others have sent; how many
    more where a second receiver of each node then asks for the same."""
    slots = {"x": Slot(0, (NUM_BYTES,), torch.uint8)}
    before, arrived = chunks_sent(cluster), []
    for version in VERSIONS:
        ref = ray.put(FlatBuffer(np.full(NUM_BYTES, version, dtype=np.uint8), slots))
        published = PublishedWeights(version, ref=(ref,), nodes=nodes)
        arrived.append(ray.get([r.receive.remote(published) for r in receivers]))
    after = chunks_sent(cluster)
    again = ray.get([r.receive.remote(published) for r in beside])
    assert again == [NUM_VERSIONS] * len(beside)
    holders = len(nodes_with_a_copy(ref))
    num_again = sum(chunks_sent(cluster).values()) - sum(after.values())
    chunks = {node: after[node] - before[node] for node in after}
    learner = chunks.pop(ray.get_runtime_context().get_node_id())
    per_copy = -(-NUM_BYTES // CHUNK_BYTES)
    return {
        "arrived": arrived,
        "holders": holders,
        "sent_again": num_again,
        "copies_sent": {"learner": learner / per_copy, "others": sum(chunks.values()) / per_copy},
    }


def main() -> None:
    cluster = start_cluster(NUM_NODES, STORE_BYTES)
    receivers, beside = (
        [Receiver.options(resources={f"node{number}": 0.5}).remote() for number in range(NUM_NODES)]
        for _ in range(2)
    )
    nodes = tuple(ray.get([receiver.node.remote() for receiver in receivers]))
    print(json.dumps([publish(receivers, beside, how, cluster) for how in ((), nodes)]))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
