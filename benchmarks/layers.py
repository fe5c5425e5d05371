"""Which layers of ours for processors pay: whole iterations with each of them taken out.

    python benchmarks/layers.py --models 5m 30m 135m --precisions float32 bf16
    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 python benchmarks/layers.py --precisions bf16  # no AMX
    python benchmarks/layers.py --variants all onednn                 # float32_products alone

A process takes one model, precision and algorithm, and builds it once for each variant; their
iterations are taken in turn, so that whatever else the machine does meets all of them. One thread;
the first iteration of each is not counted. One JSON line for each process: the median of the
CPU-seconds, and of what an iteration takes without a layer over what the one with all beside it
takes (1.10: the layer saves a tenth of an iteration). One algorithm alone misleads: GRPO makes no
pass without gradient, RLOO one for the reference, PPO one more for the values.

    all        as the package runs
    onednn     float32 products by oneDNN (float32_products); another number, not a layer taken out
    fused      without the trunk of Llama's shape, its layers and its bfloat16 attention
    half       without its bfloat16 attention alone
    dense      rows padded to the longest, and so without that trunk
    llama_step transformers' own forward for decoding, in decode_layout's weights
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# hidden size, inner size, layers, heads, key heads, vocabulary
MODELS = {
    "tiny": (32, 64, 2, 2, 1, 300),
    "5m": (256, 688, 4, 4, 4, 2048),
    "30m": (384, 1024, 8, 6, 2, 16_384),
    "135m": (576, 1536, 30, 9, 3, 49_152),
}
ALGORITHMS = ("grpo", "rloo", "ppo")
GROUP = 8
# The function that decides whether a layer is used.
DECIDED_BY = {
    "fused": ("rllib_llm.modules.trunk", "is_fusible"),
    "half": ("rllib_llm.modules.llama_trunk", "reads_half"),
    "dense": ("rllib_llm.modules.trunk", "reads_dense"),
    "llama_step": ("rllib_llm.engines.decode_step", "is_llama_shaped"),
}
VARIANTS = ("all", "onednn", *DECIDED_BY)


@contextmanager
def without(variant: str) -> Iterator[None]:
    """The layer is not used while the context is open."""
    if variant not in DECIDED_BY:
        yield
        return
    name, decision = DECIDED_BY[variant]
    module = importlib.import_module(name)
    own = getattr(module, decision)
    setattr(module, decision, lambda *args, **kwargs: False)
    try:
        yield
    finally:
        setattr(module, decision, own)


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


def build(algorithm: str, model: str, variant: str, precision: str, prompts: int) -> Any:
    """The algorithm, with so many prompts of a group of completions in an iteration."""
    from rllib_llm import GRPOConfig, PPOPtxConfig, RLOOConfig

    configs = {"grpo": GRPOConfig, "rloo": RLOOConfig, "ppo": PPOPtxConfig}
    config = (
        configs[algorithm]()
        .language_model(
            model=model,
            mixed_precision="bf16" if precision == "bf16" else None,
            float32_products="onednn" if variant == "onednn" else "mkl",
        )
        .environment(
            "rllib_llm/RLHF-v0",
            env_config={
                "prompts": [{"prompt": f"{i} + {i + 1} = " * 3} for i in range(prompts)],
                "reward_functions": [num_even],
                "max_prompt_len": 32,
            },
        )
        .training(
            train_batch_size_per_learner=GROUP * prompts, minibatch_size=GROUP * prompts // 2,
            num_epochs=2, ref_kl_coeff=0.0 if algorithm == "grpo" else 0.05, lr=1e-6,
        )
        .sampling(num_completions=GROUP, max_new_tokens=64, log_samples_every=0)
    )  # fmt: skip
    with without(variant):
        return config.build_algo()


def measure(
    name: str, precision: str, algorithm: str, variants: list[str], args: argparse.Namespace
) -> dict[str, Any]:
    """CPU-seconds of iterations of all variants in turn, in this process."""
    import ray
    import torch

    torch.set_num_threads(1)
    ray.init(address="local", num_cpus=16, include_dashboard=False, object_store_memory=2**27)
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(name, Path(folder))
        built = {v: build(algorithm, model, v, precision, args.prompts) for v in variants}
        seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        for _ in range(args.rounds + 1):
            for variant, trained in built.items():
                with without(variant):
                    start = time.process_time()
                    trained.train()
                    seconds[variant].append(time.process_time() - start)
    counted = {variant: times[1:] for variant, times in seconds.items()}
    line: dict[str, Any] = {
        "model": name, "precision": precision, "algorithm": algorithm, "rounds": args.rounds,
        "isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "all"),
        "cpu_s": {v: round(statistics.median(times), 3) for v, times in counted.items()},
    }  # fmt: skip
    if "all" in counted:
        whole = counted["all"]
        line["over_all"] = {
            v: round(statistics.median(a / b for a, b in zip(times, whole, strict=True)), 3)
            for v, times in counted.items()
        }
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["5m", "30m", "135m"])
    parser.add_argument("--precisions", nargs="+", choices=("float32", "bf16"),
                        default=["float32", "bf16"])  # fmt: skip
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8, help="groups of 8 in an iteration")
    args = parser.parse_args()
    cases = [(m, p, a) for m in args.models for p in args.precisions for a in args.algorithms]
    if len(cases) == 1:
        (case,) = cases
        skipped = {"onednn"} if case[1] == "bf16" else {"half"}
        variants = [variant for variant in args.variants if variant not in skipped]
        print(json.dumps(measure(*case, variants, args)), flush=True)
        return
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for model, precision, algorithm in cases:
        command = [sys.executable, __file__, "--models", model, "--precisions", precision,
                   "--algorithms", algorithm, "--variants", *args.variants,
                   "--rounds", str(args.rounds), "--prompts", str(args.prompts)]  # fmt: skip
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with:\n{done.stderr[-3000:]}")
        print(done.stdout.strip().splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
