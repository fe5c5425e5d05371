"""What can only be measured on a CUDA device: `make bench-gpu`, or

    python -m benchmarks.loop.gpu --parts decode graphs iteration judges --rounds 5

decode: tokens per second of a 0.5 B-shaped random Llama in bfloat16, 256 rows, 128 + 256 tokens,
    against transformers.generate and against the device's memory bandwidth (each step must read all
    weights, and the keys and values of every row so far).
graphs: decoding with CUDA graphs against the same without, a small and a large model, full and
    mixed lengths: whether `cuda_graphs` (on by default) pays on this device.
iteration: one GRPO iteration with a model of that shape, by stage.
peer: the same iteration by TRL's GRPOTrainer, where TRL is installed.
judges: a frozen model of that shape in bfloat16, int8 and nf4: bytes, seconds per batch, and how
    far its next-token distributions are from bfloat16's.

Each line is one JSON object that names the device.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import CASES, Case, build_model, build_prompts
from benchmarks.sampling.generate import compare

CASE = "500m_full"
GRAPH_CASES = ("5m_full", CASE, "500m_mixed")
COPY_BYTES = 4 * 1024**3
VOCAB_OF_TEXTS = 256  # prompts and completions of the other parts are plain characters
BATCH, MINIBATCH, NUM_COMPLETIONS, LR = 256, 64, 8, 1e-6  # of an iteration
JUDGED_ROWS, JUDGED_TOKENS = 64, 256


def require_cuda() -> str:
    """The device's name; ends the program where there is none."""
    if not torch.cuda.is_available():
        sys.exit(
            "benchmarks.loop.gpu must run on a machine with a CUDA device: torch sees none. "
            "For a CPU there are the other scripts of this folder."
        )
    return torch.cuda.get_device_name()


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """Median seconds of a call, the device's work included, after one for warming up."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def memory_bandwidth(rounds: int) -> float:
    """Bytes per second that a copy on the device reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source), rounds)


def bytes_read(case: Case, parameters: int, itemsize: int) -> int:
    """Least bytes that decoding all completions of `case` reads."""
    rows = case.groups * case.num_completions
    key_heads = case.key_value_heads or case.hidden // 64
    per_position = 2 * case.layers * key_heads * 64 * itemsize
    seen = sum(case.prompt_len + step for step in range(1, case.completion_len))
    embedding = case.vocab * case.hidden  # a lookup reads a few rows of it
    weights = (parameters - embedding) * itemsize * (case.completion_len - 1)
    return weights + rows * per_position * seen


def decode(rounds: int) -> dict[str, Any]:
    """Ours against transformers, and against the time that reading alone would take."""
    line = compare(CASE, rounds, "cuda", torch.bfloat16)
    bandwidth = memory_bandwidth(rounds)
    least = bytes_read(CASES[CASE], line["parameters"], itemsize=2) / bandwidth
    return line | {
        "bandwidth_gb_per_s": round(bandwidth / 1e9, 1),
        "least_s": round(least, 4),
        "share_of_bandwidth": round(least / line["ours"]["wall_s"], 3),
    }


def graphs(name: str, rounds: int) -> dict[str, Any]:
    """Ours against ours with every operation launched by itself."""
    return compare(name, rounds, "cuda", torch.bfloat16, ("ours", "no_graphs"))


def save_model(folder: str) -> None:
    """A random model of the case's shape with a tokenizer of single characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {chr(i): i for i in range(3, VOCAB_OF_TEXTS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    build_model(CASES[CASE], "cpu", torch.bfloat16).save_pretrained(folder)


def count_digits(completions: list[str]) -> list[float]:
    """A reward that costs nothing."""
    return [float(sum(letter.isdigit() for letter in text)) for text in completions]


def prompts() -> list[dict[str, str]]:
    """As many as the batch has rows, of the case's length."""
    return [{"prompt": f"{i:0{CASES[CASE].prompt_len}d}"} for i in range(BATCH)]


def iteration(rounds: int, folder: str) -> dict[str, Any]:
    """Median seconds of each stage of a GRPO iteration, learner and sampler on the device."""
    from rllib_llm import GRPOConfig

    case = CASES[CASE]
    config = (
        GRPOConfig()
        .environment(
            "rllib_llm/RLHF-v0",
            env_config={"prompts": prompts(), "reward_functions": count_digits, "reference": None,
                        "max_prompt_len": case.prompt_len},
        )
        .language_model(model=folder, dtype="bfloat16")
        .learners(num_learners=0, num_gpus_per_learner=1)
        .sampling(
            num_completions=NUM_COMPLETIONS, max_new_tokens=case.completion_len, log_samples_every=0
        )
        .training(
            lr=LR, ref_kl_coeff=0.0, train_batch_size_per_learner=BATCH, minibatch_size=MINIBATCH
        )
    )  # fmt: skip
    algorithm = config.build_algo()
    try:
        results = [algorithm.train()["throughput"] for _ in range(rounds + 1)][1:]
    finally:
        algorithm.stop()
        shutil.rmtree(algorithm.logdir, ignore_errors=True)
    return {name: round(statistics.median(r[name] for r in results), 4) for name in results[0]}


def peer(rounds: int, folder: str) -> dict[str, Any]:
    """Median seconds of the same iteration by TRL: model, prompts, reward, batch, optimiser steps.
    It generates as TRL does by default, by transformers."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    steps = BATCH // MINIBATCH  # of the optimiser
    times = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % steps == 0:
                torch.cuda.synchronize()
                times.append(time.perf_counter())

    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=lambda completions, **columns: count_digits(completions),
        train_dataset=Dataset.from_list(prompts()),
        args=GRPOConfig(
            output_dir=f"{folder}/trl", model_init_kwargs={"dtype": "bfloat16"}, bf16=True,
            per_device_train_batch_size=MINIBATCH, gradient_accumulation_steps=1,
            num_generations=NUM_COMPLETIONS, beta=0.0,
            steps_per_generation=steps, max_steps=steps * (rounds + 2), learning_rate=LR,
            max_completion_length=CASES[CASE].completion_len, gradient_checkpointing=False,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        ),
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    taken = [after - before for before, after in itertools.pairwise(times)]
    return {"iteration_seconds": round(statistics.median(taken), 4)}


def judge(rounds: int, folder: str, quantization: str) -> dict[str, Any]:
    """Size, speed and drift of a frozen model in few bits."""
    from rllib_llm.envs.frozen_models import FrozenReference
    from rllib_llm.modules.quantization import model_bytes

    reference = FrozenReference(
        folder, quantization=quantization, dtype="bfloat16", device="cuda",
        measure_drift=0 if quantization == "none" else 8,
    )  # fmt: skip
    ids, mask = build_prompts(
        Case(1, 1, VOCAB_OF_TEXTS, groups=JUDGED_ROWS, prompt_len=JUDGED_TOKENS), "cuda"
    )
    half = JUDGED_TOKENS // 2
    run = functools.partial(
        reference.logprobs, ids[:, :half], mask[:, :half], ids[:, half:], mask[:, half:]
    )
    run()  # measures the drift
    return {
        "megabytes": round(model_bytes(reference.model) / 1e6, 1),
        "seconds": round(seconds(run, rounds), 4),
        "rows": JUDGED_ROWS,
        "tokens": JUDGED_TOKENS,
        **{name: round(value, 5) for name, value in reference.metrics().items()},
    }


def main() -> None:
    parts = ("decode", "graphs", "iteration", "peer", "judges")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    device = require_cuda()

    def show(part: str, line: dict[str, Any]) -> None:
        print(json.dumps({"part": part, "device": device, **line}), flush=True)

    if "decode" in args.parts:
        show("decode", decode(args.rounds))
    if "graphs" in args.parts:
        for name in GRAPH_CASES:
            show("graphs", graphs(name, args.rounds))
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        if "iteration" in args.parts:
            show("iteration", iteration(args.rounds, folder))
        if "peer" in args.parts and importlib.util.find_spec("trl") is None:
            print("peer is left out: TRL is not installed", file=sys.stderr)
        elif "peer" in args.parts:
            show("peer", peer(args.rounds, folder))
        if "judges" in args.parts:
            for quantization in ("none", "int8", "nf4"):
                show(f"judge {quantization}", judge(args.rounds, folder, quantization))


if __name__ == "__main__":
    main()
