"""Memory of a frozen judge's replica: bfloat16 beside int8 and nf4, and the time of a batch.

    python benchmarks/replica_memory.py [--hidden 768 --layers 12 --vocab 32000]

A random Llama classifier is written once; each replica is loaded and scores a batch in a process of
its own. Megabytes beyond what importing took: `peak` while loading and scoring, `held` after, and
what the weights alone take. One JSON line each, ratios to bfloat16 last.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

KINDS = {"bf16": ("none", "bfloat16"), "int8": ("int8", "float32"), "nf4": ("nf4", "float32")}
ROWS, LENGTH = 16, 64


def write_model(folder: str, args: argparse.Namespace) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from rllib_llm.examples.reviews_model import build_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        max_position_embeddings=512,
        pad_token_id=0,
        num_labels=1,
    )
    LlamaForSequenceClassification(config).to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def held_mb() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(kind: str, folder: str) -> dict[str, float | str]:
    from rllib_llm.envs.frozen_models import RewardModelScorer
    from rllib_llm.modules.quantization import model_bytes

    torch.set_num_threads(1)
    before = held_mb()
    quantization, dtype = KINDS[kind]
    scorer = RewardModelScorer(folder, quantization=quantization, dtype=dtype)
    ids = torch.randint(3, 500, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    started = time.process_time()
    scorer.score_tokens(ids[:, :16], mask[:, :16], ids[:, 16:], mask[:, 16:])
    seconds = time.process_time() - started
    return {
        "replica": kind,
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before),
        "held_mb": round(held_mb() - before),
        "weights_mb": round(model_bytes(scorer.model) / 2**20),
        "score_cpu_s": round(seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--replica", nargs=2, help=argparse.SUPPRESS)  # kind and folder
    args = parser.parse_args()
    if args.replica:
        print(json.dumps(run(*args.replica)))
        return
    lines = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, args)
        for kind in KINDS:
            command = [sys.executable, __file__, "--replica", kind, folder]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            lines[kind] = json.loads(done.stdout.strip().splitlines()[-1])
            print(json.dumps(lines[kind]), flush=True)
    names = ("peak_mb", "held_mb", "weights_mb")
    for kind in ("int8", "nf4"):
        ratios = {n: round(lines[kind][n] / lines["bf16"][n], 2) for n in names}
        print(json.dumps({"ratio": f"{kind} / bf16", **ratios}))


if __name__ == "__main__":
    main()
