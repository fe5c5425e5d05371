"""A cluster whose nodes are processes of this machine, for `chaos.py` to kill."""

from __future__ import annotations

from typing import Any

import ray
from ray.cluster_utils import Cluster

NUM_CPUS = 3  # of each node: the run's five processes need two nodes
OBJECT_STORE_BYTES = 128 * 1024**2


class Nodes:
    """A head, where the script runs, and others, of which any may be killed."""

    def __init__(self, num_nodes: int):
        self._dead: set[int] = set()
        self._cluster = Cluster(
            initialize_head=True, head_node_args=self._settings(num_cpus=2),
            shutdown_at_exit=False,  # by signal handlers, which a thread cannot set
        )  # fmt: skip
        for _ in range(num_nodes):
            self.add()
        ray.init(address=self._cluster.address, log_to_driver=False)

    def add(self) -> None:
        """One more node; nobody waits for it."""
        self._cluster.add_node(wait=False, **self._settings(num_cpus=NUM_CPUS))

    @staticmethod
    def _settings(num_cpus: int) -> dict[str, Any]:
        return {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False}  # fmt: skip

    def pids(self) -> list[int]:
        """Of the raylets of all nodes but the head that were not replaced."""
        pids = {_raylet_pid(node) for node in self._cluster.worker_nodes}
        return sorted(pids - self._dead)

    def replace(self, pid: int) -> None:
        """Starts another node for the one whose raylet was killed or stopped."""
        self._dead.add(pid)
        self.add()

    def bury(self) -> None:
        """Ends what is left of the replaced ones."""
        for node in list(self._cluster.worker_nodes):
            if _raylet_pid(node) in self._dead:
                self._cluster.remove_node(node, allow_graceful=False)

    def shutdown(self) -> None:
        self._cluster.shutdown()


def _raylet_pid(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid
