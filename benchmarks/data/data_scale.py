"""How the start of a run grows with the number of its prompts.

    python -m benchmarks.data.data_scale [--rows 1000 100000 100000000] [--folder FOLDER]
                                    [--plot FILE.png]

For each size a Parquet file of prompts is written, and read as training reads it, each time in a
process of its own: first (a large file is unpacked into the cache of `datasets`) and again. One
JSON line each: `start_s` until the first 256 prompts are there, `batch_ms` of the 100 batches of
256 that follow, from all over the file, and `memory_mb`: what the process took for them that could
not be given back (without pages of mapped files). The last line of a size is of rows that are
strings in a Python list, up to a million.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

BATCH = 256
NUM_BATCHES = 100
CHUNK = 1_000_000
WORDS = ("sea", "bicycle", "bread", "rain", "garden", "winter", "glass", "letter", "train", "stone")


def text(number: int) -> str:
    words = [WORDS[(number >> shift) % len(WORDS)] for shift in range(0, 24, 4)]
    return f"Write sentence {number} about {' '.join(words)}."


def texts(numbers: np.ndarray) -> pa.Array:
    """`text` of each."""
    words = [pa.array(WORDS).take((numbers >> shift) % len(WORDS)) for shift in range(0, 24, 4)]
    named = pc.binary_join_element_wise("Write sentence", pa.array(numbers).cast(pa.string()),
                                        "about", *words, " ")  # fmt: skip
    return pc.binary_join_element_wise(named, ".", "")


def write(path: Path, num_rows: int) -> None:
    with pq.ParquetWriter(path, pa.schema([("prompt", pa.string())])) as writer:
        for start in range(0, num_rows, CHUNK):
            numbers = np.arange(start, min(num_rows, start + CHUNK))
            writer.write_table(pa.table({"prompt": texts(numbers)}))


def measure(data: str, case: str) -> dict[str, float | int | str]:
    """In this process: the time and memory of one start."""
    from rllib_llm.envs.prompts import PromptSource

    process = psutil.Process()
    before = _own_mb(process)
    source = [text(number) for number in range(int(data))] if case == "list" else data
    began = time.perf_counter()
    prompts = PromptSource(source, seed=1)
    prompts.rows(0, BATCH)
    start_s = time.perf_counter() - began
    batches = []
    for number in range(1, NUM_BATCHES + 1):
        began = time.perf_counter()
        prompts.rows(number * BATCH, BATCH)
        batches.append(time.perf_counter() - began)
    return {
        "rows": len(prompts),
        "case": case,
        "start_s": round(start_s, 3),
        "batch_ms": round(1000 * statistics.median(batches), 2),
        "memory_mb": round(_own_mb(process) - before, 1),
    }


def _own_mb(process: psutil.Process) -> float:
    """Memory that is no file's: resident without what is shared or mapped."""
    info = process.memory_info()
    return (info.rss - info.shared) / 1e6


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Seconds of a start and memory over the number of prompts."""
    import matplotlib.pyplot as plt

    figure, (seconds, memory) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for case in dict.fromkeys(point["case"] for point in points):
        chosen = [point for point in points if point["case"] == case]
        rows = [point["rows"] for point in chosen]
        label = "strings in a list" if case == "list" else case
        seconds.plot(rows, [point["start_s"] for point in chosen], "o-", label=label)
        memory.plot(rows, [point["memory_mb"] for point in chosen], "o-", label=label)
    seconds.set(xscale="log", yscale="log", xlabel="prompts", ylabel="s until the first batch")
    memory.set(xscale="log", yscale="log", xlabel="prompts", ylabel="MB of the process")
    memory.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10**3, 10**5, 10**6, 10**7, 10**8])
    parser.add_argument("--folder", help="for the files; they are removed")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--measure", nargs=2, metavar=("DATA", "CASE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)), flush=True)
        return
    points = []
    for num_rows in arguments.rows:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            path = Path(folder) / "prompts.parquet"
            write(path, num_rows)
            environment = {**os.environ, "HF_DATASETS_CACHE": f"{folder}/cache"}
            cases = [(str(path), "first start"), (str(path), "again")]
            if num_rows <= 10**6:
                cases.append((str(num_rows), "list"))
            for case in cases:
                command = [sys.executable, "-m", "benchmarks.data.data_scale", "--measure", *case]
                done = subprocess.run(
                    command, env=environment, check=True, stdout=subprocess.PIPE, text=True
                )
                print(done.stdout, end="", flush=True)
                points.append(json.loads(done.stdout))
    if arguments.plot:
        draw(points, arguments.plot)


if __name__ == "__main__":
    main()
