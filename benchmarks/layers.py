"""Which layers of ours for processors pay: whole GRPO iterations with each of them taken out.

    python benchmarks/layers.py --models 5m 30m 135m --precisions float32 bf16
    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 python benchmarks/layers.py --precisions bf16  # no AMX
    python benchmarks/layers.py --variants all onednn                 # float32_products alone

Each variant runs in a process of its own, one thread, in turn, `--rounds` times; a process takes
`--steps` iterations and gives the median of their CPU-seconds without the first. One JSON line for
each model and precision: the medians over rounds, and what an iteration takes without a layer over
what it takes with all (1.10: the layer saves a tenth of an iteration).

    all        as the package runs
    onednn     float32 products by oneDNN (float32_products); another number, not a layer taken out
    fused      without the trunk of Llama's shape: fused_layers, llama_trunk and half_attention
    half       without half_attention
    dense      without dense_packing, and so without the trunk: padded rows
    llama_step transformers' own forward for decoding, in decode_weights' layout
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

# hidden size, inner size, layers, heads, key heads, vocabulary
MODELS = {
    "tiny": (32, 64, 2, 2, 1, 300),
    "5m": (256, 688, 4, 4, 4, 2048),
    "30m": (384, 1024, 8, 6, 2, 16_384),
    "135m": (576, 1536, 30, 9, 3, 49_152),
}
PROMPTS = 8


def _without(module: str, name: str) -> Callable[[], None]:
    def take_out() -> None:
        import importlib

        setattr(importlib.import_module(module), name, lambda *args, **kwargs: False)

    return take_out


MODULES = "rllib_llm.modules"
VARIANTS: dict[str, tuple[Callable[[], None], ...]] = {
    "all": (),
    "onednn": (),
    "fused": (_without(f"{MODULES}.trunk", "is_fusible"),),
    "half": (_without(f"{MODULES}.llama_trunk", "reads_half"),),
    "dense": (_without(f"{MODULES}.trunk", "reads_dense"),),
    "llama_step": (_without("rllib_llm.engines.decode_step", "is_llama_shaped"),),
}


def num_even(completions: list[str]) -> list[float]:
    """A reward that costs nothing: how often a completion says "2"."""
    return [float(completion.count("2")) for completion in completions]


def save_model(name: str, folder: Path) -> str:
    """A random Llama of that size with a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rllib_llm.examples.characters import character_tokenizer

    hidden, inner, layers, heads, key_heads, vocab = MODELS[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=512,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    special = ("<pad>", "<eos>", "<unk>")
    character_tokenizer("0123456789 +=", special=special).save_pretrained(folder)
    return str(folder)


def run(name: str, variant: str, precision: str, steps: int) -> dict[str, Any]:
    """Median CPU-seconds of an iteration, in this process."""
    import ray
    import torch

    from rllib_llm.algorithms.grpo import GRPOConfig

    for take_out in VARIANTS[variant]:
        take_out()
    torch.set_num_threads(1)
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=2**27)
    with tempfile.TemporaryDirectory() as folder:
        config = (
            GRPOConfig()
            .language_model(
                model=save_model(name, Path(folder)),
                mixed_precision="bf16" if precision == "bf16" else None,
                float32_products="onednn" if variant == "onednn" else "mkl",
            )
            .environment(
                "rllib_llm/RLHF-v0",
                env_config={
                    "prompts": [{"prompt": f"{i} + {i + 1} = " * 3} for i in range(PROMPTS)],
                    "reward_functions": [num_even],
                    "max_prompt_len": 32,
                },
            )
            .training(
                train_batch_size_per_learner=8 * PROMPTS, minibatch_size=32, num_epochs=2,
                ref_kl_coeff=0.0, lr=1e-6,
            )
            .sampling(num_completions=8, max_new_tokens=64, log_samples_every=0)
        )  # fmt: skip
        algorithm = config.build_algo()
        seconds = []
        for _ in range(steps):
            start = time.process_time()
            algorithm.train()
            seconds.append(time.process_time() - start)
        algorithm.stop()
    return {"cpu_s": statistics.median(seconds[1:])}


def compare(name: str, precision: str, args: argparse.Namespace) -> dict[str, Any]:
    """All variants in turn."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    skipped = {"onednn"} if precision == "bf16" else {"half"}
    variants = [variant for variant in args.variants if variant not in skipped]
    found: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(args.rounds):
        for variant in variants:
            command = [sys.executable, __file__, "--one", name, variant, precision,
                       "--steps", str(args.steps)]  # fmt: skip
            done = subprocess.run(command, env=environ, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} ended with:\n{done.stderr[-3000:]}")
            found[variant].append(json.loads(done.stdout.strip().splitlines()[-1])["cpu_s"])
    medians = {variant: statistics.median(times) for variant, times in found.items()}
    line: dict[str, Any] = {
        "model": name, "precision": precision, "rounds": args.rounds,
        "isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "all"),
        "cpu_s": {variant: round(median, 3) for variant, median in medians.items()},
    }  # fmt: skip
    if "all" in found:
        line["over_all"] = {
            variant: round(statistics.median(
                without / whole for without, whole in zip(times, found["all"], strict=True)
            ), 3)
            for variant, times in found.items()
        }  # fmt: skip
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["5m", "30m", "135m"])
    parser.add_argument("--precisions", nargs="+", choices=("float32", "bf16"),
                        default=["float32", "bf16"])  # fmt: skip
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # one process
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run(*args.one, args.steps)))
        return
    for name in args.models:
        for precision in args.precisions:
            print(json.dumps(compare(name, precision, args)), flush=True)


if __name__ == "__main__":
    main()
