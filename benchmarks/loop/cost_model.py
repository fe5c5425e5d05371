"""The cost model of docs/explanations/scale.md beside measurements on this machine.

    OMP_NUM_THREADS=1 python -m benchmarks.loop.cost_model [--rounds 3] [--points 0 1 2 3]
                                                      > benchmarks/results/cost_model.jsonl

The model is `scripts/scale.py`, its constants those of one core, measured in the same process just
before: FLOP/s of the model's own products with as many rows as the learner's, bytes/s of reading a
gigabyte, seconds of an iteration of a tiny model outside of sampling and learning, bytes/s from
Ray's store of one raylet to that of another. They are what is reached, not peaks: shares are 1.

Random float32 models train by GRPO with a reference, one step an iteration, sampler and learner in
this process, completions of full length. One JSON line each of `sampling`, `learning` (with the
reference) and `iteration`: CPU-seconds `predicted` and `measured` (the least of the rounds after
the first), `ratio` measured to predicted. Another line is of the products of `sampling` alone, with
the rows of a decode step.

Of `weights` in bfloat16, from the learner's raylet to as many others as `nodes` says less one:
seconds, the least of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from scripts import scale

TINY = "tiny"


@dataclass(frozen=True)
class Point:
    """A model of `generation_cases` and an iteration."""

    case: str
    name: str
    job: scale.Job


def job(prompts: int, prompt: int, completion: int) -> scale.Job:
    return scale.Job(prompts, 8, prompt, completion, shares_prompts=True)


POINTS = (
    Point("5m_full", "5 M", job(8, 32, 64)),
    Point("5m_full", "5 M", job(32, 32, 128)),
    Point("135m_full", "135 M", job(1, 64, 32)),
    Point("135m_full", "135 M", job(4, 64, 64)),
)
NODES = (2, 4)
LEARNER_ROWS = 1024  # tokens of a micro-batch, of which the learner's products are
LINK_BYTES = 100 * 10**6
WEIGHTS_BYTES = 2  # of a parameter


# --- constants ------------------------------------------------------------------------------------


def least(turn: Callable[[], Any], rounds: int = 5) -> float:
    """CPU-seconds of the fastest turn."""
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        turn()
        seconds.append(time.process_time() - started)
    return min(seconds)


def products_s(model: Any, rows: int) -> tuple[float, float]:
    """CPU-seconds of all matrix products of a forward pass with so many rows, and their number of
    floating-point operations."""
    import torch

    weights = [each.weight for each in model.modules() if isinstance(each, torch.nn.Linear)]
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]) for w in weights}

    @torch.no_grad()
    def turn() -> None:
        for weight in weights:
            inputs[weight.shape[1]] @ weight.T

    return least(turn), 2.0 * rows * sum(w.numel() for w in weights)


def read_bandwidth() -> float:
    """Bytes/s of reading memory that is in no cache."""
    import torch

    numbers = torch.ones(2**28)
    return 4 * numbers.numel() / least(numbers.sum)


def link_bandwidth(rounds: int) -> float:
    """Bytes/s of an array that goes from one raylet's store to another's."""
    import numpy as np
    import ray

    from benchmarks.weights.publish import start_cluster

    cluster = start_cluster(1, 4 * LINK_BYTES)

    @ray.remote(num_cpus=0, resources={"node0": 1})
    class Other:
        def read(self, array: Any) -> int:
            return int(array[-1])

    other, numbers, seconds = Other.remote(), np.ones(LINK_BYTES, np.uint8), []
    for _ in range(rounds + 4):
        ref = ray.put(numbers)
        started = time.perf_counter()
        ray.get(other.read.remote(ref))
        seconds.append(time.perf_counter() - started)
        del ref
    ray.shutdown()
    cluster.shutdown()
    return LINK_BYTES / min(seconds)


# --- iterations -----------------------------------------------------------------------------------


def case_of(name: str) -> Any:
    from benchmarks.common import CASES, Case

    return Case(64, 1, 512) if name == TINY else CASES[name]


def make_config(folder: str, job: scale.Job) -> Any:
    from benchmarks.loop.scaling import judge
    from rllib_llm import GRPOConfig

    # Longer than `job.prompt` tokens, of which each keeps the last.
    prompts = [{"prompt": "very " * (2 * job.prompt) + f"good {i}"} for i in range(64)]
    return (
        GRPOConfig()
        .language_model(model=folder)
        .environment(
            "rllib_llm/RLHF-v0",
            env_config={
                "prompts": prompts,
                "reward_functions": [{"function": judge, "name": "length"}],
                "max_prompt_len": job.prompt,
                "max_completion_len": job.completion,
            },
        )
        .sampling(
            num_completions=job.group,
            max_new_tokens=job.completion,
            min_new_tokens=job.completion,
            log_samples_every=0,
        )
        .training(train_batch_size_per_learner=job.rows, lr=1e-6, num_epochs=1)
    )


def iterations(model: Any, job: scale.Job, rounds: int) -> dict[str, float]:
    """The least CPU-seconds of sampling, learning and the rest, after a first iteration."""
    from benchmarks.common import Stopwatch
    from rllib_llm.examples.reviews_model import build_tokenizer

    watch, lines = Stopwatch(), []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer = build_tokenizer(512)
        tokenizer.add_tokens([f"word{i}" for i in range(model.config.vocab_size - len(tokenizer))])
        tokenizer.model_max_length = 2048
        tokenizer.save_pretrained(folder)
        config = make_config(folder, job)
        runner = watch.timed_runner(config.get_default_env_runner_class())
        learner = watch.timed_class(config.get_default_learner_class(), {"update": "learning"})
        algorithm = config.env_runners(env_runner_cls=runner).learners(
            learner_class=learner
        ).build_algo()  # fmt: skip
        for _ in range(rounds + 1):
            with watch.span("rest"):
                algorithm.train()
            cpu = {name: spans[1] for name, spans in watch.take().items()}
            # The reference is the environment's.
            sampling, learning = cpu["generate"], cpu["learning"] + cpu["judge"]
            total = sum(cpu.values())
            rest = total - sampling - learning
            lines.append((sampling, learning, total, rest))
        algorithm.stop()
    found = map(min, zip(*lines[1:], strict=True))
    return dict(zip(("sampling", "learning", "iteration", "rest"), found, strict=True))


# --- both -----------------------------------------------------------------------------------------


def gpu_of(constants: dict[str, float]) -> scale.Gpu:
    """A core as the model's GPU; what is measured is what it reaches."""
    return scale.Gpu(**constants, memory_share=1.0, flops_share=1.0)


def predict(what: str, model: scale.Model, job: scale.Job, gpu: scale.Gpu, nodes: int) -> float:
    """Seconds of one of the things that are measured."""
    if what == "learning":
        return scale.learning_s(model, job, gpu, 1)
    if what == "iteration":
        plan = scale.best_plan(model, job, gpu, 1)
        assert plan is not None, f"{model.name} does not fit into memory"
        return plan.seconds
    if what == "weights":
        return scale.weights_s(model, gpu, nodes * scale.NODE)
    return scale.sampling_s(model, job, gpu, 1)


def line_of(
    what: str,
    measured: float,
    model: scale.Model,
    job: scale.Job,
    constants: dict[str, float],
    nodes: int = 1,
) -> dict[str, Any]:
    predicted = predict(what, model, job, gpu_of(constants), nodes)
    return {
        "model": model.name,
        "what": what,
        "of": f"{nodes} nodes" if what == "weights" else size_of(job),
        "with": constants_of(what, constants),
        "predicted": round(predicted, 3),
        "measured": round(measured, 3),
        "ratio": round(measured / predicted, 2),
        "params": model.params,
        "layers": model.layers,
        "kv_width": model.kv_width,
        "number_bytes": model.number_bytes,
        "job": asdict(job),
        "nodes": nodes,
        "constants": constants,
    }


def constants_of(what: str, constants: dict[str, float]) -> str:
    """The constants that a prediction is made of."""
    if what == "weights":
        return f"{constants['link'] / 1e9:.2f} GB/s of a link"
    said = [f"{constants['flops'] / 1e9:.0f} GFLOP/s"]
    if what != "learning":
        said.append(f"{constants['bandwidth'] / 1e9:.1f} GB/s")
    if what == "iteration":
        said.append(f"{constants['rest_s']:.2f} s of the rest")
    return ", ".join(said)


def size_of(job: scale.Job) -> str:
    return f"{job.rows} × ({job.prompt} + {job.completion}) tokens"


def model_of(point: Point, model: Any, number_bytes: int) -> scale.Model:
    config, count = model.config, sum(p.numel() for p in model.parameters())
    kv_width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    return scale.Model(point.name, count, config.num_hidden_layers, kv_width, number_bytes)


def measure_point(point: Point, rounds: int) -> Iterable[dict[str, Any]]:
    """Sampling, learning and an iteration, in this process."""
    import psutil
    import ray
    import torch

    from benchmarks.common import build_model

    torch.set_num_threads(1)
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=2**28)
    model = build_model(case_of(point.case), "cpu", torch.float32)
    tiny = build_model(case_of(TINY), "cpu", torch.float32)
    seconds, operations = products_s(model, LEARNER_ROWS)
    decoding, _ = products_s(model, point.job.rows)
    constants = {
        "flops": operations / seconds,
        "bandwidth": read_bandwidth(),
        "rest_s": iterations(tiny, point.job, rounds)["rest"],
        "memory": float(psutil.virtual_memory().total),
    }
    shape = model_of(point, model, 4)
    found = iterations(model, point.job, rounds)
    found["sampling, its products alone"] = decoding * point.job.completion
    for what in ("sampling", "sampling, its products alone", "learning", "iteration"):
        yield line_of(what, found[what], shape, point.job, constants)


def measure_weights(points: Iterable[Point], rounds: int) -> Iterable[dict[str, Any]]:
    """Publications to other raylets, after one link alone."""
    import torch

    from benchmarks.common import build_model
    from benchmarks.weights.publish import nodes as publish
    from benchmarks.weights.publish import payload_bytes

    torch.set_num_threads(1)
    link = link_bandwidth(rounds)
    for point in {point.case: point for point in points}.values():
        shape = model_of(point, build_model(case_of(point.case), "cpu", torch.float32), 2)
        num_bytes = payload_bytes(round(shape.weight_bytes / 1e6))
        for count in NODES:
            done = publish(num_bytes, rounds, count - 1, count - 1)
            best = min(done[order]["least_seconds"] for order in ("at_once", "in_turns"))
            yield line_of("weights", best, shape, point.job, {"link": link}, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--points", type=int, nargs="*", default=list(range(len(POINTS))))
    parser.add_argument("--no-weights", action="store_true")
    parser.add_argument("--point", type=int, help=argparse.SUPPRESS)  # in this process
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if arguments.point is not None:
        for line in measure_point(POINTS[arguments.point], arguments.rounds):
            print(json.dumps(line), flush=True)
        return
    own = [sys.executable, "-m", "benchmarks.loop.cost_model", "--rounds", str(arguments.rounds)]
    for number in arguments.points:
        # Ray's words go to the same output.
        done = subprocess.run(
            [*own, "--point", str(number)], check=True, stdout=subprocess.PIPE, text=True
        )
        for text in done.stdout.splitlines():
            if text.startswith("{"):
                print(text, flush=True)
    if not arguments.no_weights:
        for line in measure_weights((POINTS[i] for i in arguments.points), arguments.rounds):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
