"""GRPO in mixed precision beside float32: whole iterations, turn by turn in one process.

    python -m benchmarks.loop.precision --cases small large --rounds 5
    python -m benchmarks.loop.precision --cases small --layers fused own compiled

One JSON line per case: CPU-seconds of both by span (generation, judge and preparation, training),
the ratio of float32 to bf16, medians over the rounds without the first, and `logprob_gap`, the mean
difference between the sampler's and the learner's log-probs. `--layers` has the learner compute
with our fused layers, with transformers' own, or with those compiled; there is a line for each.
Skipped where the processor has neither AMX nor AVX512-BF16.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.common import Stopwatch, add
from rllib_llm import GRPOConfig
from rllib_llm.examples import arithmetic
from rllib_llm.runs.doctor.machine_rules import Machine

SPANS = ("generate", "score", "train", "total")
PRECISIONS = {"float32": None, "bf16": "bf16"}
LAYERS = ("fused", "own", "compiled")


@dataclass(frozen=True)
class Case:
    """Sizes of the model and of one iteration; lengths in tokens."""

    hidden: int
    inner: int
    layers: int
    vocab: int
    batch: int = 64
    minibatch: int = 32
    prompt_len: int = 32
    completion_len: int = 64
    epochs: int = 2


CASES = {
    # 1.1 million parameters, as the examples train.
    "tiny": Case(128, 512, 4, 512),
    # As `grpo_full` of iteration.py.
    "small": Case(256, 1024, 4, 2048),
    # 135 million parameters.
    "large": Case(768, 2048, 12, 49_152, epochs=1, minibatch=64),
}


def build_policy(case: Case) -> Any:
    """A Llama of random weights, and the character tokenizer with words up to its vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    _, tokenizer = arithmetic.build_model(0, hidden_size=16, num_layers=1, num_heads=2, max_len=16)
    tokenizer.add_tokens([f"word{i}" for i in range(case.vocab - len(tokenizer))])
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=case.vocab, hidden_size=case.hidden, intermediate_size=case.inner,
            num_hidden_layers=case.layers, num_attention_heads=case.hidden // 64,
            num_key_value_heads=case.hidden // 64, max_position_embeddings=256,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )  # fmt: skip
    return model, tokenizer


def count_ones(completions: list[str], **columns: Any) -> list[float]:
    """A score that varies."""
    return [float(completion.count("1")) for completion in completions]


def build_algorithm(
    case: Case, folder: Path, mixed_precision: str | None, watch: Stopwatch, layers: str
) -> Any:
    prompts = [{"prompt": f"{i:0{case.prompt_len}d}"} for i in range(512)]
    config = (
        GRPOConfig()
        .language_model(model=str(folder), mixed_precision=mixed_precision)
        .environment(
            "rllib_llm/RLHF-v0",
            env_config={
                "prompts": prompts,
                "reward_functions": [{"function": count_ones, "name": "ones"}],
                "max_prompt_len": case.prompt_len,
            },
        )
        .sampling(num_completions=8, max_new_tokens=case.completion_len, log_samples_every=0)
        .training(
            train_batch_size_per_learner=case.batch, minibatch_size=case.minibatch,
            num_epochs=case.epochs, lr=1e-5, ref_kl_coeff=0.0,
        )
        .debugging(seed=0)
        .framework(torch_compile_learner=layers == "compiled")
    )  # fmt: skip
    config.env_runners(env_runner_cls=watch.timed_runner(config.get_default_env_runner_class()))
    learner_class = config.get_default_learner_class()
    config.learners(learner_class=watch.timed_class(learner_class, {"prepare": "prepare"}))
    return config.build_algo()


def iterate(algorithm: Any, watch: Stopwatch) -> dict[str, float]:
    """CPU-seconds of one iteration by span, and its gap."""
    with watch.span("train"):
        result = algorithm.train()
    spans = watch.take()
    spans["score"] = add(spans.pop("judge"), spans.pop("prepare"))
    spans["total"] = add(*spans.values())
    return {name: spans[name][1] for name in SPANS} | {"gap": result["sampler"]["logprob_gap"]}


def compare(case: Case, rounds: int, layers: str) -> dict[str, Any]:
    """Medians of both precisions, and their ratios."""
    if layers == "fused":
        return _compared(case, rounds, layers)
    with mock.patch("rllib_llm.modules.trunk.is_fusible", lambda trunk: False):
        return _compared(case, rounds, layers)


def _compared(case: Case, rounds: int, layers: str) -> dict[str, Any]:
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in PRECISIONS}
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = build_policy(case)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        del model
        watches = {name: Stopwatch() for name in PRECISIONS}
        algorithms = {
            name: build_algorithm(case, Path(folder), precision, watches[name], layers)
            for name, precision in PRECISIONS.items()
        }
        for _ in range(rounds + 1):
            for name, algorithm in algorithms.items():
                figures[name].append(iterate(algorithm, watches[name]))
        for algorithm in algorithms.values():
            algorithm.stop()
    line: dict[str, Any] = {"parameters": num_parameters}
    for name, all_rounds in figures.items():
        keys = all_rounds[0]
        line[name] = {k: round(statistics.median(r[k] for r in all_rounds[1:]), 6) for k in keys}
    pairs = list(zip(*(figures[name][1:] for name in PRECISIONS), strict=True))
    for span in SPANS:
        ratios = [exact[span] / half[span] for exact, half in pairs]
        line[f"ratio_{span}"] = round(statistics.median(ratios), 2)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=["fused"])
    parser.add_argument("--batch", type=int, help="completions of an iteration, else 64")
    args = parser.parse_args()
    if not Machine.here(Path()).computes_bfloat16:
        print("skipped: the processor has neither AMX nor AVX512-BF16")
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=2**27)
    torch.set_num_threads(1)
    for name in args.cases:
        case = CASES[name]
        if args.batch:
            sizes = {"batch": args.batch, "minibatch": min(args.batch, case.minibatch)}
            case = Case(**{**vars(case), **sizes})
        for layers in args.layers:
            line = {"case": name, "layers": layers, **compare(case, args.rounds, layers)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
