"""How fast weights travel, beside one memcpy of the same bytes in the same process.

    python -m benchmarks.weights.publish [--mb 200 1000] [--rounds 5]
        [--cases aliased copied stall ...]
    python -m benchmarks.weights.publish --cases nodes --mb 100 --receivers 1 8 64 \
        --raylets 1 2 4 8 [--plot benchmarks/figures/weights_nodes.png]

One JSON line per case and size: medians over the rounds, of seconds and of their ratio to a memcpy
taken just before (`ratio`), and of the CPU seconds of all processes taking part as a ratio to those
of the memcpy (`cpu_ratio`), which says more on a machine that does other work. bfloat16.

    aliased   publish until 4 receivers on this node have loaded, their parameters being the store
    copied    the same, copied into parameters
    direct    the same by NIXL, without the store (`make test-nixl` installs it)
    stall     what the learner waits for when publishing in the background
    swap      from "take the new weights" to "they are in use", between the batches of a process
              that reads all weights, 320 tensors, all the time; reads that saw two versions (torn)
    first     the first put into a fresh Ray, and into one started with
              RAY_preallocate_plasma_memory=1
    store     bytes in the object store with K versions kept and one in use by a slow receiver
    checksum  the CRC-32 that `weights_checksum` costs on each side
    nodes     publish until all of `--receivers` on `--raylets` nodes (raylets of this machine with
              a store each, beside the learner's) have loaded, all pulling at once and in turns:
              copies that left the learner's node and the others, beside those of a tree in which
              each holder gives one copy per turn; seconds; CPU seconds of all processes for each
              copy. The receivers of a node share a process, which would else take 0.3 GB each.
              Only when asked for
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from ray.cluster_utils import Cluster

from rllib_llm.weights.background import BackgroundPublisher
from rllib_llm.weights.coordinator import CoordinatorClient
from rllib_llm.weights.direct import DirectTransport, has_nixl
from rllib_llm.weights.flat_buffer import lay_side_by_side, pack, scatter, verify
from rllib_llm.weights.loading import ModuleLoader
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.receiver import WeightsFollower, WeightsReceiver

NUM_RECEIVERS = 4
SWAP_TENSORS = 320
WARM_UPS = 4  # the store hands out fresh, cold memory three times before it comes round
# Workers as nice as this process: other work on the machine must not hold up one side. Nodes report
# all bytes of their store, not only those of primary copies.
SYSTEM_CONFIG = {"worker_niceness": 0, "scheduler_report_pinned_bytes_only": False}
MIB = 2**20
# How many times the payload each needs at its height.
CASES = {
    "aliased": 10, "copied": 11, "direct": 17, "stall": 9, "swap": 8, "first": 6, "store": 8,
    "checksum": 4,
}  # fmt: skip
CHUNK_BYTES = 5 * MIB  # Ray's: what a node sends in one message
MAX_SECONDS = 120.0  # until all raylets have written their state


class Weights:
    """A module as large as asked for: matrices 32 wide, of ones."""

    def __init__(
        self,
        num_bytes: int,
        dtype: torch.dtype = torch.bfloat16,
        num_tensors: int = 32,
        empty: bool = False,
    ):
        rows = num_bytes // dtype.itemsize // num_tensors // 32
        new = torch.empty if empty else torch.ones  # of empty ones no page is touched
        self._own = {
            f"layers.{i}.weight": torch.nn.Parameter(
                new(rows, 32, dtype=dtype), requires_grad=False
            )
            for i in range(num_tensors)
        }

    def fill(self, value: int) -> None:
        for tensor in self._own.values():
            tensor.fill_(value)

    def values(self) -> set[float]:
        """All that it holds, every byte being read."""
        found = [tensor.aminmax() for tensor in self._own.values()]
        return {float(value) for low_high in found for value in low_high}

    def ends(self) -> set[float]:
        """First and last number of every matrix."""
        return {float(tensor[i, i]) for tensor in self._own.values() for i in (0, -1)}

    def own_tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._own)

    def set_state(self, state) -> None:
        for name, tensor in self._own.items():
            tensor.copy_(state[name])


@ray.remote(num_cpus=0)
class Receiver:
    """A sampler's share of the work."""

    def __init__(self, num_bytes: int, dtype: torch.dtype, alias: bool):
        torch.set_num_threads(1)
        self.module, self.loader = Weights(num_bytes, dtype), ModuleLoader(alias=alias)
        self.receiver = WeightsReceiver()

    def receive(self, published: PublishedWeights) -> float:
        """CPU seconds of this process since it started, after the weights are in use."""
        self.receiver.ensure(published, lambda flat: self.loader.load(self.module, flat))
        return time.process_time()

    def ends(self) -> set[float]:
        """See `Weights`."""
        return self.module.ends()


class Memcpy:
    """Seconds and CPU seconds of one copy of so many bytes, both ends warm, one thread."""

    def __init__(self, num_bytes: int):
        self.source = np.ones(num_bytes, dtype=np.uint8)
        self.target = np.ones(num_bytes, dtype=np.uint8)

    def __call__(self) -> tuple[float, float]:
        start, cpu = time.perf_counter(), time.process_time()
        np.copyto(self.target, self.source)
        return time.perf_counter() - start, time.process_time() - cpu


def payload_bytes(megabytes: int) -> int:
    """About so many, in whole rows of `Weights`."""
    return megabytes * 10**6 // 2**17 * 2**17


def require_memory(num_bytes: int) -> None:
    """Ends the script where it would take memory that others use."""
    available = psutil.virtual_memory().available
    if available < num_bytes:
        raise SystemExit(f"{available / 1e9:.1f} GB are free, {num_bytes / 1e9:.1f} are needed.")


def start_ray(store_bytes: int, *, preallocate: bool = False) -> None:
    """A Ray of our own, its store bounded."""
    ray.shutdown()
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=store_bytes,
        _system_config={**SYSTEM_CONFIG, "preallocate_plasma_memory": preallocate},
    )


def compare(memcpy: Memcpy, turn: Callable[[], tuple[float, float]], rounds: int) -> dict:
    """Medians of `turn` (seconds, CPU seconds) after the warm-ups, and of its ratios."""
    turns, copies = [], []
    for number in range(rounds + WARM_UPS):
        copy, taken = memcpy(), turn()
        if number >= WARM_UPS:
            copies.append(copy)
            turns.append(taken)
    ratios = [
        [taken[i] / max(copy[i], 1e-9) for taken, copy in zip(turns, copies, strict=True)]
        for i in (0, 1)
    ]
    return {
        "ratio": round(statistics.median(ratios[0]), 2),
        "ratios": [round(ratio, 2) for ratio in ratios[0]],
        "cpu_ratio": round(statistics.median(ratios[1]), 2),
        "seconds": round(statistics.median(t[0] for t in turns), 4),
        "memcpy_seconds": round(statistics.median(c[0] for c in copies), 4),
    }


def broadcast(
    num_bytes: int,
    rounds: int,
    *,
    alias: bool,
    dtype=torch.bfloat16,
    export: Callable[[dict[str, torch.Tensor]], Any] = scatter,
) -> dict:
    """Publish until all receivers have loaded. Weights are changed before every round, and looked
    at after it."""
    start_ray(3 * num_bytes + 64 * MIB)
    memcpy = Memcpy(num_bytes)
    weights = Weights(num_bytes, dtype)
    lay_side_by_side(weights.own_tensors())  # as a learner does before its first export
    receivers = [Receiver.remote(num_bytes, dtype, alias) for _ in range(NUM_RECEIVERS)]
    published = [PublishedWeights(0)]
    before = [0.0]

    def turn() -> tuple[float, float]:
        version = published[0].version + 1
        weights.fill(version)
        start, cpu = time.perf_counter(), time.process_time()
        ref = ray.put(export(weights.own_tensors()))
        published[0] = PublishedWeights(version, ref=(ref,))
        theirs = sum(ray.get([r.receive.remote(published[0]) for r in receivers]))
        seconds, own = time.perf_counter() - start, time.process_time() - cpu
        found = set().union(*ray.get([r.ends.remote() for r in receivers]))
        if found != {float(version)}:
            raise SystemExit(f"Receivers hold {found} after weights {version} were loaded.")
        theirs, before[0] = theirs - before[0], theirs
        return seconds, own + theirs

    return compare(memcpy, turn, rounds)


def direct(num_bytes: int, rounds: int) -> dict:
    """`broadcast` from this process's memory into the receivers', who copy it into place."""
    if not has_nixl():
        return {"skipped": "NIXL is not installed"}
    return broadcast(num_bytes, rounds, alias=False, export=DirectTransport().export)


def stall(num_bytes: int, rounds: int) -> dict:
    """What `submit` takes while the versions before it are put and announced."""
    start_ray(4 * num_bytes + 64 * MIB)
    memcpy, tensors = Memcpy(num_bytes), Weights(num_bytes).own_tensors()
    client = CoordinatorClient("stall")
    publisher = BackgroundPublisher(client)
    version = [0]

    def turn() -> tuple[float, float]:
        version[0] += 1
        start, cpu = time.perf_counter(), time.thread_time()
        publisher.submit(tensors, version[0])
        taken = time.perf_counter() - start, time.thread_time() - cpu
        publisher.wait(600)
        return taken

    result = compare(memcpy, turn, rounds)
    publisher.stop()
    client.close()
    return result


@ray.remote(num_cpus=0)
class Follower:
    """A process that works with the weights of a run."""

    def __init__(self, name: str, num_bytes: int):
        torch.set_num_threads(1)
        self.module, loader = Weights(num_bytes, num_tensors=SWAP_TENSORS), ModuleLoader(alias=True)
        self.follower = WeightsFollower(
            CoordinatorClient(name),
            lambda use: use(),
            prepare=lambda flat: loader.prepare(self.module, flat),
        )

    def follow(self, num_swaps: int) -> tuple[list[tuple[float, float]], int]:
        """Milliseconds of each swap, by the clock and of this thread's CPU time, and how many
        batches saw more than one version."""
        self.follower.require(timeout=600)
        self.follower.start()
        milliseconds, torn = [], 0
        while len(milliseconds) < num_swaps:
            torn += self.module.values() != {self.follower.in_use.version}
            start, cpu = time.perf_counter(), time.thread_time()
            if self.follower.swap():
                taken = time.perf_counter() - start, time.thread_time() - cpu
                milliseconds.append((1e3 * taken[0], 1e3 * taken[1]))
        self.follower.stop()
        return milliseconds, torn


def swap(num_bytes: int, rounds: int) -> dict:
    """Milliseconds of `WeightsFollower.swap`, a version coming every second or so."""
    start_ray(5 * num_bytes + 64 * MIB)
    client = CoordinatorClient("swap")
    publisher = BackgroundPublisher(client)
    weights = Weights(num_bytes, num_tensors=SWAP_TENSORS)
    following = Follower.remote("swap", num_bytes).follow.remote(4 * rounds)
    version = 0
    while not ray.wait([following], timeout=0)[0]:
        time.sleep(1)
        version = version % 100 + 1  # bfloat16 knows these exactly
        weights.fill(version)
        publisher.submit(weights.own_tensors(), version)
        publisher.wait(600)
    milliseconds, torn = ray.get(following)
    publisher.stop()
    client.close()
    return {
        "milliseconds": round(statistics.median(ms for ms, _ in milliseconds), 3),
        "cpu_milliseconds": round(statistics.median(cpu for _, cpu in milliseconds), 3),
        "all_milliseconds": [round(ms, 3) for ms, _ in milliseconds],
        "torn": torn,
    }


def first(num_bytes: int, rounds: int) -> dict:
    """Ratio of the first put of a fresh Ray, pages of the store not handed out yet or so."""
    memcpy, result = Memcpy(num_bytes), {}
    flat = pack(Weights(num_bytes).own_tensors())
    for name, preallocate in (("as_it_is", False), ("preallocated", True)):
        ratios = []
        for _ in range(min(rounds, 3)):
            start_ray(2 * num_bytes + 64 * MIB, preallocate=preallocate)
            memcpy()
            copy = memcpy()[0]
            start = time.perf_counter()
            ref = ray.put(flat)
            ratios.append((time.perf_counter() - start) / copy)
            del ref
        result[name] = round(statistics.median(ratios), 2)
    return {"ratio": result}


def store(num_bytes: int, rounds: int) -> dict:
    """Copies in the store, in units of the payload."""
    start_ray(6 * num_bytes + 64 * MIB)
    slow = Receiver.remote(num_bytes, torch.bfloat16, True)
    client = CoordinatorClient("store", keep=2)
    publisher = BackgroundPublisher(client)
    used = {}
    for version in range(6):
        publisher.submit(Weights(num_bytes).own_tensors(), version)
        publisher.wait(600)
        if version == 1:
            ray.get(slow.receive.remote(client.latest()))
        time.sleep(2)  # Ray frees in the background
        used[version] = round(sum(bytes_in_store().values()) / num_bytes, 4)
    publisher.stop()
    client.close()
    return {"keep": 2, "versions_pinned_by_receivers": 1, "copies_after_version": used}


def bytes_in_store() -> dict[str, int]:
    """Of each node, by its id, as it reports them."""
    from ray._private.state import available_resources_per_node, total_resources_per_node

    name, free = "object_store_memory", available_resources_per_node()
    return {
        node: round(total[name] - free[node].get(name, 0))
        for node, total in total_resources_per_node().items()
    }


def checksum(num_bytes: int, rounds: int) -> dict:
    """Verification of a buffer that is in memory."""
    memcpy = Memcpy(num_bytes)
    flat = pack(Weights(num_bytes).own_tensors(), checksum=True)

    def turn() -> tuple[float, float]:
        start, cpu = time.perf_counter(), time.process_time()
        verify(flat)
        return time.perf_counter() - start, time.process_time() - cpu

    return compare(memcpy, turn, rounds)


# --- Several nodes


@ray.remote(num_cpus=0)
class NodeReceivers:
    """The receivers of a node, a thread each."""

    def __init__(self, count: int, num_bytes: int):
        torch.set_num_threads(1)
        self.receivers = []
        for _ in range(count):
            module, loader = Weights(num_bytes, empty=True), ModuleLoader(alias=True)
            self.receivers.append((WeightsReceiver(), module, loader))
        self.threads = ThreadPoolExecutor(count)

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def receive(self, published: PublishedWeights) -> set[float]:
        """The numbers at the ends of all that they hold, after the weights are in use."""

        def one(receiver, module, loader) -> set[float]:
            receiver.ensure(published, lambda flat: loader.load(module, flat))
            return module.ends()

        return set().union(*self.threads.map(lambda each: one(*each), self.receivers))


def start_cluster(raylets: int, store_bytes: int) -> Cluster:
    settings = {"object_store_memory": store_bytes, "include_dashboard": False}
    system = {**SYSTEM_CONFIG, "debug_dump_period_milliseconds": 200}
    head = {"num_cpus": 0, "_system_config": system, **settings}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for number in range(raylets):
        cluster.add_node(num_cpus=1, resources={f"node{number}": 1}, **settings)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    cluster.wait_for_nodes()
    return cluster


def chunks_sent(cluster: Cluster) -> dict[str, int]:
    """Messages with weights that each node has sent, as it says from now on: in the state that its
    raylet writes now and then, all into one file."""
    state_file = Path(cluster.head_node.get_session_dir_path()) / "logs" / "debug_state.txt"
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
        node = re.search(r"Node ID: (\w+)", state)
        count = re.search(r"ObjectManagerService\.grpc_client\.Push - (\d+) total", state)
        if node and "DebugString() time ms" in state:  # else it is being written
            sent[node.group(1)] = int(count.group(1)) if count else 0
    return sent


def cpu_of_cluster() -> float:
    """CPU seconds of this process and of those that it started."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:2])
    return total


def nodes(num_bytes: int, rounds: int, num_receivers: int, raylets: int) -> dict:
    """See the top. A node that has a copy gives it to one more at a time, which is what turns are
    for: after t of them up to 2**t nodes have one."""
    cluster = start_cluster(raylets, 3 * num_bytes + 64 * MIB)
    own = ray.get_runtime_context().get_node_id()
    shares = [len(range(i, num_receivers, raylets)) for i in range(raylets)]
    receivers = [
        NodeReceivers.options(resources={f"node{i}": 1}).remote(share, num_bytes)
        for i, share in enumerate(shares)
    ]
    turns = tuple(ray.get([each.node.remote() for each in receivers]))
    weights = Weights(num_bytes)
    lay_side_by_side(weights.own_tensors())
    per_copy = math.ceil(sum(t.nbytes for t in weights.own_tensors().values()) / CHUNK_BYTES)
    result: dict[str, Any] = {"receivers": num_receivers, "raylets": raylets}
    version = 0
    for name, order in (("at_once", ()), ("in_turns", turns)):
        seconds, before, cpu = [], {}, 0.0
        for number in range(rounds + WARM_UPS):
            if number == WARM_UPS:
                before, cpu = chunks_sent(cluster), cpu_of_cluster()
            version += 1
            weights.fill(version)
            start = time.perf_counter()
            ref = ray.put(scatter(weights.own_tensors()))
            published = PublishedWeights(version, ref=(ref,), nodes=order)
            found = set().union(*ray.get([each.receive.remote(published) for each in receivers]))
            seconds.append(time.perf_counter() - start)
            if found != {float(version)}:
                raise SystemExit(f"Receivers hold {found} after weights {version} were loaded.")
        cpu, after = cpu_of_cluster() - cpu, chunks_sent(cluster)
        copies = {node: (after[node] - before[node]) / per_copy / rounds for node in after}
        learner = copies.pop(own)
        result[name] = {
            "seconds": round(statistics.median(seconds[WARM_UPS:]), 4),
            "least_seconds": round(min(seconds[WARM_UPS:]), 4),
            "copies_from_learner": round(learner, 2),
            "copies_from_others": round(sum(copies.values()), 2),
            "cpu_seconds_per_copy": round(cpu / rounds / raylets, 4),
        }
    result["tree"] = {"copies_from_learner": math.ceil(math.log2(raylets + 1)), "copies": raylets}
    ray.shutdown()
    cluster.shutdown()
    return result


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Copies that left the learner's node over the nodes."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    most = max(point["receivers"] for point in points if point["mb"] == points[0]["mb"])
    chosen = [p for p in points if p["receivers"] == most and p["mb"] == points[0]["mb"]]
    raylets = [p["raylets"] for p in chosen]
    for name, label in (("at_once", "all at once"), ("in_turns", "in turns"), ("tree", "tree")):
        sent = [point[name]["copies_from_learner"] for point in chosen]
        axes.plot(raylets, sent, "k--" if name == "tree" else "o-", label=label)
    axes.set_xlabel(f"nodes, {most} receivers, {points[0]['mb']} MB")
    axes.set_ylabel("copies sent by the learner's node")
    axes.legend()
    figure.savefig(path, dpi=150)


def aliased(num_bytes: int, rounds: int) -> dict:
    """`broadcast`, parameters being the store."""
    return broadcast(num_bytes, rounds, alias=True)


def copied(num_bytes: int, rounds: int) -> dict:
    """`broadcast`, copied into parameters."""
    return broadcast(num_bytes, rounds, alias=False)


def settings_of(case: str, arguments: argparse.Namespace) -> list[dict[str, int]]:
    """With which a case is run, one after the other."""
    if case != "nodes":
        return [{}]
    return [
        {"num_receivers": receivers, "raylets": raylets}
        for receivers in arguments.receivers
        for raylets in arguments.raylets
        if raylets <= receivers
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, nargs="+", default=[200])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=[*CASES, "nodes"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--raylets", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    points = []
    for megabytes in arguments.mb:
        num_bytes = payload_bytes(megabytes)
        for case in arguments.cases:
            for settings in settings_of(case, arguments):
                ray.shutdown()
                time.sleep(1)
                # Of nodes: the learner's, its store, and two versions in each other store.
                copies = 3 + 2 * settings["raylets"] if case == "nodes" else CASES[case]
                require_memory(copies * num_bytes)
                result = globals()[case](num_bytes, arguments.rounds, **settings)
                points.append({"case": case, "mb": megabytes, **result})
                print(json.dumps(points[-1]), flush=True)
    ray.shutdown()
    if arguments.plot:
        draw([point for point in points if point["case"] == "nodes"], arguments.plot)


if __name__ == "__main__":
    main()
