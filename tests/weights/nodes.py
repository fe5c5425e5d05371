"""A script: a learner's node publishes to others, at once and in waves; says who sent how much.

What a node has sent stands in the state that its raylet writes now and then, all into one file.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster

from rllib_llm.weights.coordinator import PublishedWeights
from rllib_llm.weights.flat_buffer import FlatBuffer, Slot, unpack
from rllib_llm.weights.receiver import WeightsReceiver, nodes_with_a_copy

NUM_NODES = 6  # beside the learner's
NUM_VERSIONS = 3
VERSIONS = range(1, NUM_VERSIONS + 1)
NUM_BYTES = 39 * 2**20  # and a header: 8 messages
CHUNK_BYTES = 5 * 2**20  # Ray's: what a node sends in one message
STORE_BYTES = 160 * 2**20
MAX_SECONDS = 120.0  # until all raylets have written their state

_LAST_LINE = "DebugString() time ms"
_SENT = re.compile(r"ObjectManagerService\.grpc_client\.Push - (\d+) total")


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
        self.receiver.ensure(published, lambda flat: found.extend(unpack(flat)["x"].aminmax()))
        low, high = found
        assert low == high
        return int(low)


def start() -> Cluster:
    settings = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    system = {"debug_dump_period_milliseconds": 200}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": system, **settings}
    )
    for number in range(NUM_NODES):
        cluster.add_node(num_cpus=1, resources={f"node{number}": 1}, **settings)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    cluster.wait_for_nodes()
    return cluster


def chunks_sent(state_file: Path) -> dict[str, int]:
    """Messages with weights that each node has sent, as it says from now on."""
    began, sent = time.time(), {}
    nodes = {node["NodeID"] for node in ray.nodes()}
    while set(sent) != nodes:
        assert time.time() < began + MAX_SECONDS, f"{len(sent)} nodes have written their state"
        time.sleep(0.02)
        try:
            if state_file.stat().st_mtime < began + 0.5:
                continue
            state = state_file.read_text()
        except FileNotFoundError:
            continue
        node, count = re.search(r"Node ID: (\w+)", state), _SENT.search(state)
        if node and _LAST_LINE in state:  # else it is being written
            sent[node.group(1)] = int(count.group(1)) if count else 0
    return sent


def publish(receivers: list, nodes: tuple[str, ...], state_file: Path) -> dict:
    """What arrived, and how many whole copies the learner's node and the others have sent."""
    slots = {"x": Slot(0, (NUM_BYTES,), torch.uint8)}
    before, arrived = chunks_sent(state_file), []
    for version in VERSIONS:
        ref = ray.put(FlatBuffer(np.full(NUM_BYTES, version, dtype=np.uint8), slots))
        published = PublishedWeights(version, ref=(ref,), nodes=nodes)
        arrived.append(ray.get([r.receive.remote(published) for r in receivers]))
    holders = len(nodes_with_a_copy(ref))
    after = chunks_sent(state_file)
    chunks = {node: after[node] - before[node] for node in after}
    learner = chunks.pop(ray.get_runtime_context().get_node_id())
    per_copy = -(-NUM_BYTES // CHUNK_BYTES)
    return {
        "arrived": arrived,
        "holders": holders,
        "copies_sent": {"learner": learner / per_copy, "others": sum(chunks.values()) / per_copy},
    }


def main() -> None:
    cluster = start()
    receivers = [
        Receiver.options(resources={f"node{number}": 1}).remote() for number in range(NUM_NODES)
    ]
    nodes = tuple(ray.get([receiver.node.remote() for receiver in receivers]))
    state_file = Path(cluster.head_node.get_session_dir_path()) / "logs" / "debug_state.txt"
    print(json.dumps([publish(receivers, how, state_file) for how in ((), nodes)]))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
