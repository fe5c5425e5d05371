"""What a long run leaves behind: memory, files and seconds per iteration, from beginning to end.

    python -m benchmarks.runs.soak [--iterations 5000] [--every 100] [--plot FILE.png]

`rllib train` runs GRPO on sums with a small model and one sampler in a process of its own, keeps
two checkpoints and all rollouts. One JSON line for every so many iterations: `seconds` per
iteration since the last line, and of the run's processes together `own_mb` (resident, without what
is shared), `open_files` and `threads`; of the run's folder `folder_mb`, `files` and `result_mb`
(result.json). The last line compares the second tenth of the run with the last: `growth` is the
ratio of each.
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

import psutil
import yaml

POLL_S = 1.0
FLAT = ("seconds", "own_mb", "open_files", "threads")


def experiment(iterations: int) -> dict[str, Any]:
    return {
        "soak": {
            "run": "GRPO",
            "env": "rllib_llm/Arithmetic-v0",
            "stop": {"training_iteration": iterations},
            "checkpoint_config": {
                "checkpoint_frequency": max(1, iterations // 20),
                "num_to_keep": 2,
            },
            "config": {
                "model": "rllib_llm.examples.arithmetic.build_model",
                "max_new_tokens": 4,
                "train_batch_size_per_learner": 32,
                "num_completions": 8,
                "minibatch_size": 32,
                "num_env_runners": 1,
                "log_samples_every": 50,
            },
        }
    }


def processes(root: psutil.Process) -> list[psutil.Process]:
    """The run's own, without Ray's servers."""
    names = ("rllib", "ray::", "python")
    return [p for p in [root, *root.children(recursive=True)] if p.name().startswith(names)]


def measure(root: psutil.Process, folder: Path) -> dict[str, Any]:
    own = files = threads = 0
    for process in processes(root):
        try:
            memory = process.memory_info()
            own += memory.rss - memory.shared
            files += process.num_fds()
            threads += process.num_threads()
        except psutil.Error:
            continue
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    results = [size for path, size in sizes.items() if path.name == "result.json"]
    return {
        "own_mb": round(own / 1e6, 1),
        "open_files": files,
        "threads": threads,
        "folder_mb": round(sum(sizes.values()) / 1e6, 2),
        "files": len(sizes),
        "result_mb": round(sum(results) / 1e6, 2),
    }


def lines_of(folder: Path) -> int:
    """Iterations that the run has reported."""
    return sum(path.read_bytes().count(b"\n") for path in folder.rglob("result.json"))


def follow(folder: Path, iterations: int, every: int) -> list[dict[str, Any]]:
    file = folder / "soak.yaml"
    file.write_text(yaml.safe_dump(experiment(iterations)), encoding="utf-8")
    results = folder / "results"
    command = [
        str(Path(sys.executable).with_name("rllib")), "train", "file", str(file), "--storage-path",
        str(results),
    ]  # fmt: skip
    points: list[dict[str, Any]] = []
    with (folder / "log").open("w") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
        root = psutil.Process(run.pid)
        last_done, last_time = 0, time.monotonic()
        while run.poll() is None:
            time.sleep(POLL_S)
            done = lines_of(results)
            if done < last_done + every:
                continue
            now = time.monotonic()
            seconds = (now - last_time) / (done - last_done)
            point = {"iteration": done, "seconds": round(seconds, 4), **measure(root, results)}
            print(json.dumps(point), flush=True)
            points.append(point)
            last_done, last_time = done, now
    if run.returncode:
        print((folder / "log").read_text()[-3000:], file=sys.stderr)
        raise SystemExit(run.returncode)
    return points


def growth(points: list[dict[str, Any]]) -> dict[str, float]:
    """The last tenth beside the second one: the first has the start in it."""
    tenth = max(1, len(points) // 10)
    early, late = points[tenth : 2 * tenth], points[-tenth:]
    return {
        name: round(
            statistics.fmean(p[name] for p in late) / statistics.fmean(p[name] for p in early), 3
        )
        for name in FLAT
    }


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Each number over iterations."""
    import matplotlib.pyplot as plt

    names = (*FLAT, "folder_mb", "result_mb")
    figure, rows = plt.subplots(2, 3, figsize=(9, 4.5), layout="constrained")
    for name, axes in zip(names, rows.flat, strict=True):
        axes.plot([p["iteration"] for p in points], [p[name] for p in points])
        axes.set(title=name, ylim=0)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=5000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        points = follow(Path(folder), arguments.iterations, arguments.every)
    print(json.dumps({"growth": growth(points)}), flush=True)
    if arguments.plot:
        draw(points, arguments.plot)


if __name__ == "__main__":
    main()
