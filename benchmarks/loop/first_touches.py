"""Files of the package that one `training_step` runs code of: how much of the house a reader of the
loop has to walk through.

    python -m benchmarks.loop.first_touches [--case grpo|lockstep|conversation] [--list 20]

Sampler and learner are in the driver's process; the second `training_step` is watched by a
profiler, threads included. With --list also the files of which the fewest lines are in functions
that were called.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ray

import rllib_llm
from benchmarks.common import full_length
from rllib_llm import GRPOConfig

PACKAGE = Path(rllib_llm.__file__).resolve().parent


class Touches:
    """Code that is called while it watches, by file. Threads that exist before it are not seen."""

    def __init__(self) -> None:
        self.code: dict[str, set[CodeType]] = defaultdict(set)
        self._watches = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._watches and event == "call":
            self.code[frame.f_code.co_filename].add(frame.f_code)

    def watching(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call, watched."""

        def watched() -> Any:
            self._watches = True
            try:
                return call()
            finally:
                self._watches = False

        return watched

    def files(self) -> dict[str, int]:
        """Lines in functions of the package that were called, by file."""
        lines = {}
        for name, codes in self.code.items():
            path = Path(name)
            if PACKAGE in path.parents:
                seen = {line for code in codes for *_, line in code.co_lines() if line}
                lines[str(path.relative_to(PACKAGE))] = len(seen)
        return lines


def grpo() -> GRPOConfig:
    """The default: sampled and learnt from in turn."""
    return full_length(GRPOConfig(), 32, 8)


def lockstep() -> GRPOConfig:
    """One update ahead."""
    return grpo().training(off_policy="bypass").streaming(max_staleness=1)


def conversation() -> GRPOConfig:
    """With a tool."""
    config = GRPOConfig().language_model(model="rllib_llm.examples.calculator.build_model")
    config.environment("rllib_llm/Calculator-v0").sampling(max_new_tokens=8, num_completions=4)
    return config.training(train_batch_size_per_learner=16, ref_kl_coeff=0.0)


CASES = {"grpo": grpo, "lockstep": lockstep, "conversation": conversation}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=CASES, help="all by default")
    parser.add_argument("--list", type=int, default=0, help="files with the fewest lines")
    args = parser.parse_args()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=2**27)
    for case in [args.case] if args.case else CASES:
        touches = Touches()
        algorithm = CASES[case]().build_algo()
        algorithm.train()
        algorithm.training_step = touches.watching(algorithm.training_step)
        algorithm.train()
        sys.setprofile(None)
        algorithm.stop()
        files = touches.files()
        line = {"case": case, "files": len(files), "lines": sum(files.values())}
        if args.list:
            fewest = sorted(files, key=files.__getitem__)[: args.list]
            line["fewest lines"] = {name: files[name] for name in fewest}
        print(json.dumps(line, indent=1))


if __name__ == "__main__":
    main()
