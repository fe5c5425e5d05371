"""Files of the package that one `training_step`, or one request to a server, runs code of: how much
of the house a reader of the loop has to walk through.

    python -m benchmarks.loop.first_touches [--case grpo|lockstep|conversation|request] [--list 20]

Sampler and learner, or server and engine, are in the driver's process; the second `training_step`
or request is watched by a profiler, threads included. With --list also the files of which the
fewest lines are in functions that were called.
"""

from __future__ import annotations

import argparse
import asyncio
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
from tests.serving import tiny_server

PACKAGE = Path(rllib_llm.__file__).resolve().parent


class Touches:
    """Code that is called while it watches, by file. Threads that exist before it are not seen."""

    def __init__(self) -> None:
        self.code: dict[str, set[CodeType]] = defaultdict(set)
        self.is_watching = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_watching and event == "call":
            self.code[frame.f_code.co_filename].add(frame.f_code)

    def watching(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call, watched."""

        def watched() -> Any:
            self.is_watching = True
            try:
                return call()
            finally:
                self.is_watching = False

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
REQUEST = "request"


def train(config: GRPOConfig, touches: Touches) -> None:
    """Two iterations; the second is watched."""
    algorithm = config.build_algo()
    algorithm.train()
    algorithm.training_step = touches.watching(algorithm.training_step)
    algorithm.train()
    algorithm.stop()


async def ask(touches: Touches) -> None:
    """Two chats, answered whole; the second is watched."""
    chat = [{"role": "user", "content": "1+2="}]
    body = {"model": tiny_server.NAME, "messages": chat, "max_tokens": 8}
    async with tiny_server.asgi_client(tiny_server.service()) as client:
        for watches in (False, True):
            touches.is_watching = watches
            answer = await client.post("/v1/chat/completions", json=body)
            touches.is_watching = False
            answer.raise_for_status()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=[*CASES, REQUEST], help="all by default")
    parser.add_argument("--list", type=int, default=0, help="files with the fewest lines")
    args = parser.parse_args()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=2**27)
    for case in [args.case] if args.case else [*CASES, REQUEST]:
        touches = Touches()
        if case == REQUEST:
            asyncio.run(ask(touches))
        else:
            train(CASES[case](), touches)
        sys.setprofile(None)
        files = touches.files()
        line = {"case": case, "files": len(files), "lines": sum(files.values())}
        if args.list:
            fewest = sorted(files, key=files.__getitem__)[: args.list]
            line["fewest lines"] = {name: files[name] for name in fewest}
        print(json.dumps(line, indent=1))


if __name__ == "__main__":
    main()
