"""CPU seconds of a GRPO iteration as the work grows, beside the least its matrix products can take.

    python -m benchmarks.loop.scaling --axes batch completion model samplers \\
        --plots benchmarks/figures

One thread per process. Axes: completions of an iteration, tokens of a completion, parameters of the
model, samplers. One JSON line per point: CPU seconds of generation, learning and the rest (wall
seconds too, which is what more samplers change), and the floor, floating-point operations of all
matrix products over the speed of a large one measured in the same process. A plot for each axis.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

GROUP, PROMPT_LEN, VOCAB = 8, 16, 512
MODELS = {1: (128, 4), 5: (256, 5), 20: (512, 5), 100: (1024, 6)}  # million: (hidden, layers)


@dataclass(frozen=True)
class Point:
    """One iteration's sizes; `model` in millions of parameters."""

    batch: int = 64
    completion: int = 64
    model: int = 1
    samplers: int = 0


AXES: dict[str, list[Point]] = {
    "batch": [Point(batch=n) for n in (16, 64, 256, 1024)],
    "completion": [Point(completion=n) for n in (16, 64, 256, 512)],
    "model": [Point(batch=16, completion=16, model=n) for n in MODELS],
    "samplers": [Point(batch=256, samplers=n) for n in (1, 2, 4)],
}


def judge(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) % 7) for text in completions]


def write_model(folder: str, point: Point) -> int:
    """A random Llama with a tokenizer of words; returns its number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rllib_llm.examples.reviews_model import build_tokenizer

    hidden, layers = MODELS[point.model]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            max_position_embeddings=1024,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
        )
    )
    model.save_pretrained(folder)
    tokenizer = build_tokenizer(VOCAB)
    tokenizer.model_max_length = 1024
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_config(folder: str, point: Point) -> Any:
    from rllib_llm import GRPOConfig

    return (
        GRPOConfig()
        .language_model(model=folder)
        .environment(
            "rllib_llm/RLHF-v0",
            env_config={
                "prompts": [{"prompt": f"the food was {'very ' * (i % 5)}good"} for i in range(64)],
                "reward_functions": [{"function": judge, "name": "length"}],
                "max_prompt_len": PROMPT_LEN,
                "max_completion_len": point.completion,
            },
        )
        .env_runners(num_env_runners=point.samplers)
        .sampling(
            num_completions=GROUP,
            max_new_tokens=point.completion,
            min_new_tokens=point.completion,
            log_samples_every=0,
        )
        .training(train_batch_size_per_learner=point.batch, lr=1e-6, ref_kl_coeff=0.0)
    )


def floor_seconds(point: Point, num_parameters: int, prompt_tokens: float) -> float:
    """2 operations for each weight and token in generation, 6 in learning; attention left out."""
    weights = num_parameters - VOCAB * MODELS[point.model][0]  # the embedding is no product
    tokens = point.batch * point.completion + point.batch / GROUP * prompt_tokens
    return (2 + 6) * weights * tokens / product_speed()


def product_speed() -> float:
    """Floating-point operations per CPU second of a large float32 matrix product."""
    left, right = torch.randn(2048, 1024), torch.randn(1024, 1024)
    times = []
    for _ in range(5):
        started = time.process_time()
        left @ right
        times.append(time.process_time() - started)
    return 2 * left.numel() * right.shape[1] / min(times)


def measure(point: Point, iterations: int) -> dict[str, Any]:
    """Medians over the iterations after the first."""
    import ray

    from benchmarks.common import Stopwatch

    torch.set_num_threads(1)
    if "RAY_ADDRESS" not in os.environ:
        ray.init(address="local", num_cpus=max(1, point.samplers), include_dashboard=False,
                 object_store_memory=2**28)  # fmt: skip
    watch, lines = Stopwatch(), []
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = write_model(folder, point)
        config = make_config(folder, point)
        if not point.samplers:
            config.env_runners(
                env_runner_cls=watch.timed_runner(config.get_default_env_runner_class())
            )
        learner = config.get_default_learner_class()
        config.learners(learner_class=watch.timed_class(learner, {"update": "learn"}))
        algorithm = config.build_algo()
        for _ in range(iterations + 1):
            with watch.span("rest"):
                algorithm.train()
            lines.append(watch.take())
        algorithm.stop()
    spans = {name: [statistics.median(line[name][k] for line in lines[1:]) for k in (1, 0)]
             for name in lines[0]}  # fmt: skip
    return {
        **asdict(point),
        "parameters": num_parameters,
        "[cpu, wall] s": {name: [round(t, 4) for t in pair] for name, pair in spans.items()},
        "cpu_s": round(sum(pair[0] for pair in spans.values()), 4),
        "wall_s": round(sum(pair[1] for pair in spans.values()), 4),
        "floor_s": round(floor_seconds(point, num_parameters, 8.0), 4),
    }


def plot(axis: str, lines: list[dict[str, Any]], folder: Path) -> None:
    """Seconds over the axis, logarithmic both ways, the floor dashed; for samplers by the clock,
    what they share beside the learning that follows it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.5))
    name = "parameters" if axis == "model" else axis
    at = [line[name] for line in lines]
    if axis == "samplers":
        for span, label in (("rest", "sampling, judging, the loop"), ("learn", "learning")):
            seconds = [line["[cpu, wall] s"][span][1] for line in lines]
            axes.loglog(at, seconds, "o-", label=f"{label}, wall_s")
        ideal = [lines[0]["[cpu, wall] s"]["rest"][1] / min(n, os.cpu_count() or 1) for n in at]
        axes.loglog(at, ideal, "k--", label=f"one sampler's over {os.cpu_count()} cores")
        axes.set_yscale("linear")
        axes.set_ylim(0, 1.6 * axes.dataLim.ymax)
    else:
        axes.loglog(at, [line["cpu_s"] for line in lines], "o-", label="iteration, cpu_s")
        axes.loglog(at, [line["floor_s"] for line in lines], "k--", label="matrix products alone")
    axes.set_xticks(at, [f"{x / 1e6:.3g} M" if x >= 1e6 else str(x) for x in at])
    axes.minorticks_off()
    axes.set_xlabel(name)
    axes.set_ylabel("seconds")
    axes.legend()
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"scaling_{axis}.png", dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--largest", type=int, help="leave out points beyond this on their axis")
    parser.add_argument("--plots", type=Path, help="folder for one plot per axis")
    parser.add_argument("--point", help=argparse.SUPPRESS)  # JSON of one point, in this process
    args = parser.parse_args()
    if args.point:
        print(json.dumps(measure(replace(Point(), **json.loads(args.point)), args.iterations)))
        return
    for axis in args.axes:
        lines = []
        for point in AXES[axis]:
            if args.largest and getattr(point, axis) > args.largest:
                continue
            command = [sys.executable, "-m", "benchmarks.loop.scaling",
                       "--point", json.dumps(asdict(point)),
                       "--iterations", str(args.iterations)]  # fmt: skip
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            lines.append({"axis": axis, **json.loads(done.stdout.strip().splitlines()[-1])})
            print(json.dumps(lines[-1]), flush=True)
        if args.plots:
            plot(axis, lines, args.plots)


if __name__ == "__main__":
    main()
