"""What keeping every completion costs: the writer by itself, and its share of an iteration.

    python benchmarks/rollout_store.py [--rows 256] [--tokens 64] [--iterations 6]

The writer: batches of `--writer-rows` completions of 512 tokens, as fast as they come; MB/s of the
columns in memory (what went through it) and of the files. The share: GRPO on a small Llama in one
process, each iteration once with and once without the store (the same run, in turns); CPU seconds
of all threads, so that work in the background counts, and how long the run waited. Where an
iteration varies more than that, `cpu_share_alone` says more: the CPU seconds of recording and
writing one such batch again and again, over those of an iteration without the store. JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from full_length import full_length

from rllib_llm import GRPOConfig
from rllib_llm.data.rollout_store import RolloutStore, conform
from rllib_llm.rollouts.judged_batch import JudgedBatch
from rllib_llm.rollouts.recorder import AboutRun, RolloutRecorder, rows_of
from rllib_llm.shared import columns

ABOUT = AboutRun(
    run="benchmark", env="rllib_llm/RLHF-v0", num_completions=8, num_held_out_completions=1,
    temperature=1.0, top_p=1.0, top_k=0, seed=0,
)  # fmt: skip


def random_batch(num_rows: int, num_tokens: int, seed: int) -> JudgedBatch:
    """Completions of random ids and log-probs, which compress as badly as real ones do."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50_000, (num_rows, num_tokens), generator=generator)
    mask = torch.ones(num_rows, num_tokens).bool()
    logprobs = -torch.rand(num_rows, num_tokens, generator=generator)
    place = torch.arange(num_rows)
    return JudgedBatch(
        columns={
            columns.PROMPT_IDS: ids[:, :64],
            columns.PROMPT_MASK: mask[:, :64],
            columns.COMPLETION_IDS: ids,
            columns.COMPLETION_MASK: mask,
            columns.SAMPLER_LOGPROBS: logprobs,
            columns.REF_LOGPROBS: logprobs + 0.01,
            columns.ADVANTAGES: logprobs * 0.5,
            columns.WEIGHTS_VERSION: torch.full_like(ids, seed, dtype=torch.int32),
            columns.SCORES: logprobs[:, 0],
            columns.VALID: mask[:, 0],
            columns.FINISHED: mask[:, 0],
            columns.GROUP: place // 8,
            columns.ROW_ID: place,
        },
        rewards=logprobs[:, 0],
    )


def writer(num_rows: int, num_batches: int, folder: Path) -> dict[str, float]:
    """MB/s and CPU seconds per GB of a store that is given batches as fast as it takes them."""
    batches = [random_batch(num_rows, 512, seed) for seed in range(num_batches)]
    made = [
        rows_of(
            batch,
            ABOUT,
            status="trained",
            reason="",
            ended=datetime.datetime.now(datetime.timezone.utc),
        )
        for batch in batches
    ]
    megabytes = sum(conform(table, 1).nbytes for table in made) / 1e6
    store = RolloutStore(folder)
    recorder = RolloutRecorder(store, ABOUT)
    start, cpu = time.perf_counter(), time.process_time()
    for iteration, batch in enumerate(batches):
        recorder.record(batch, "trained", iteration=iteration + 1)
    store.flush()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    metrics = store.metrics()
    store.stop()
    return {
        "mb": megabytes,
        "mb_per_s": megabytes / seconds,
        "file_mb_per_s": metrics["bytes"] / 1e6 / seconds,
        "cpu_seconds_per_gb": 1000 * cpu / megabytes,
        "waited_seconds": metrics["wait_seconds"],
    }


class Keeps:
    """A recorder that passes on what it is told, and keeps the last batch."""

    def __init__(self, recorder: RolloutRecorder) -> None:
        self._recorder = recorder
        self.batch: JudgedBatch | None = None

    def record(self, groups: JudgedBatch, status: str, **asked: Any) -> None:
        self.batch = groups
        self._recorder.record(groups, status, **asked)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)


def alone(stored: Keeps, num_times: int = 50) -> float:
    """CPU seconds of recording and writing the batch that it was told of last."""
    assert stored.batch is not None, "something was recorded"
    start = time.process_time()
    for iteration in range(num_times):
        stored.record(stored.batch, "trained", iteration=1_000_000 + iteration)
        stored.state()  # written
    return (time.process_time() - start) / num_times


def share(args: argparse.Namespace) -> dict[str, float]:
    """CPU and wall seconds of an iteration with and without the store, medians."""
    config = full_length(GRPOConfig(), args.rows, args.tokens).debugging(log_level="ERROR")
    algorithm = config.build_algo()
    stored, nothing = Keeps(algorithm.recorder), RolloutRecorder()
    spent: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    try:
        algorithm.train()
        for _ in range(args.iterations):
            for name, recorder in (("with", stored), ("without", nothing)):
                algorithm.recorder = recorder
                start, cpu = time.perf_counter(), time.process_time()
                algorithm.train()
                stored.state()  # what the background still does belongs to this iteration
                spent[name].append((time.perf_counter() - start, time.process_time() - cpu))
        metrics = stored.metrics()
        cpu_alone = alone(stored)
    finally:
        algorithm.recorder = stored
        algorithm.stop()
        shutil.rmtree(algorithm.logdir, ignore_errors=True)
    median = {
        f"{clock}_{name}": statistics.median(pair[place] for pair in pairs)
        for name, pairs in spent.items()
        for place, clock in enumerate(("wall", "cpu"))
    }
    return {
        **median,
        "cpu_share": median["cpu_with"] / median["cpu_without"] - 1,
        "wall_share": median["wall_with"] / median["wall_without"] - 1,
        "cpu_alone": cpu_alone,
        "cpu_share_alone": cpu_alone / median["cpu_without"],
        "waited_seconds": metrics["wait_seconds"],
        "bytes_per_completion": metrics["bytes"] / max(1, metrics["rows"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256, help="completions of an iteration")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each")
    parser.add_argument("--iterations", type=int, default=6, help="with the store, and without")
    parser.add_argument("--writer-rows", type=int, default=512, help="completions of a batch")
    parser.add_argument("--writer-batches", type=int, default=24, help="batches written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    try:
        found = {"writer": writer(args.writer_rows, args.writer_batches, folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    found["iteration"] = share(args)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
