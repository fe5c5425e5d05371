"""How long `rllib rollouts` takes as a run's rollouts grow.

    python -m benchmarks.data.rollouts_scale [--rows 100000 1000000 10000000] [--folder FOLDER]

For each size a folder of merged files is made (16 files of 62,500 rows of 64 tokens, linked again
and again), and asked in a process of its own: counts and the five first completions, the five of
the highest score, and five by a condition. One JSON line for each question: seconds of its answer
without Python's start, and the process's largest memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS_OF_A_FILE = 62_500
TOKENS = 64
NUM_WRITTEN = 16  # files; the others are links to these
QUESTIONS = {"first": {}, "best": {"sort": "score"}, "condition": {"where": "score > 0.9999"}}


def write(folder: Path, num_files: int) -> None:
    """A store of so many files."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.fs

    from rllib_llm.data.rollout_store import RolloutFiles, conform

    rng = np.random.default_rng(0)
    size = ROWS_OF_A_FILE
    offsets = pa.array(np.arange(size + 1, dtype=np.int32) * TOKENS)
    lists = {
        "completion_ids": rng.integers(0, 50_000, size * TOKENS).astype(np.int32),
        "logprobs": rng.normal(size=size * TOKENS).astype(np.float32),
        "advantages": np.repeat(rng.normal(size=size), TOKENS).astype(np.float32),
    }
    texts = [f"completion {i} of the benchmark, some words long" for i in range(size)]
    table = pa.table({
        "status": pa.repeat("trained", size), "reason": pa.repeat("", size),
        "position": np.arange(size) // 8, "sample": np.arange(size, dtype=np.int32) % 8,
        "row": np.zeros(size, dtype=np.int32), "prompt": texts, "completion": texts,
        "score": rng.random(size).astype(np.float32), "tokens": np.full(size, TOKENS, np.int32),
        **{name: pa.ListArray.from_arrays(offsets, values) for name, values in lists.items()},
    })  # fmt: skip
    files = RolloutFiles(str(folder), pyarrow.fs.LocalFileSystem())
    files.begin(None)
    for number in range(min(num_files, NUM_WRITTEN)):
        files.write(conform(table, number + 1), number + 1)
    for number in range(NUM_WRITTEN, num_files):
        written = folder / f"part-{number % NUM_WRITTEN:08d}.parquet"
        os.link(written, folder / f"part-{number:08d}.parquet")


def ask(folder: str, question: str) -> dict[str, float]:
    """The answer's seconds, in this process."""
    from rllib_llm.data.rollouts import open_rollouts, query, reasons, rollout_folders, summary

    start = time.monotonic()
    found = open_rollouts(rollout_folders(folder))
    counted = summary(found)
    reasons(found)
    rows = query(found, limit=5, **QUESTIONS[question]).num_rows
    seconds = time.monotonic() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    assert rows == 5
    return {"rows": counted["trained"]["completions"], "seconds": round(seconds, 2),
            "memory_mb": memory}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--folder", help="for the files; they are removed")
    parser.add_argument("--ask", nargs=2, metavar=("FOLDER", "QUESTION"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        print(json.dumps(ask(*args.ask)))
        return
    for rows in args.rows:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            write(Path(folder), max(1, rows // ROWS_OF_A_FILE))
            for question in QUESTIONS:
                command = [sys.executable, "-m", "benchmarks.data.rollouts_scale", "--ask", folder,
                           question]  # fmt: skip
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                line = {"question": question, **json.loads(done.stdout.splitlines()[-1])}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
