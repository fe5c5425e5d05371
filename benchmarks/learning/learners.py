"""What several learners cost: bytes that they send, memory of each, and waiting for one another.

    python -m benchmarks.learning.learners --nums 1 2 4
    python -m benchmarks.learning.learners --tokens

SFT of a small float32 Llama on texts of 8 to 200 tokens in learner processes joined by gloo, one
thread each. One JSON line for each strategy ("ddp", "fsdp") and number of learners, per optimiser
step and learner:

    payload_mb   tensors given to all-reduce, all-gather and reduce-scatter, beside `expected_mb`:
                 4 N bytes of gradients for "ddp"; for "fsdp" the gathered layers twice (forward and
                 backward) and their gradients once, in all 12 N
    state_mb     weights, gradients and Adam's moments, beside `expected_state_mb`: 16 N bytes, over
                 the number of learners for "fsdp"
    waiting      1 - mean / largest of the learners' CPU seconds in passes, and of their tokens
    difference   largest difference of a weight from one learner's, over the largest weight

With `--tokens` nothing is timed: 20 batches of rows of log-normal length (median 256 tokens, sigma
0.6, at most 2048) are cut as learners cut them, in micro-batches of at most 8192 tokens, and their
tokens counted. `ddp` is what the busiest learner has beyond the mean in an optimiser step, where
learners meet once (the largest of 20); `fsdp` is what they wait where they meet in every
micro-batch (the mean).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm import SFTConfig
from rllib_llm.algorithms.sft import SFT
from rllib_llm.examples import arithmetic
from rllib_llm.learners.batching import row_lengths
from rllib_llm.learners.shared_passes import SharedPasses
from rllib_llm.learners.supervised_learners import SFTLearner
from rllib_llm.modules.shards import local_data
from rllib_llm.shared import columns

COLLECTIVES = ("all_reduce", "all_gather_single", "reduce_scatter_single")  # as FSDP2 calls


class CountingLearner(SFTLearner):
    """Notes what it sends, computes and holds."""

    def build(self) -> None:
        self.payload, self.pass_seconds, self.num_tokens = 0, 0.0, 0
        super().build()
        for name in COLLECTIVES if self.distributed else ():
            self._count(name)

    def _count(self, name: str) -> None:
        send = getattr(torch.distributed, name)

        def counted(*args: Any, **kwargs: Any):
            # The whole tensor of a collective, which is the larger of its two.
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            self.payload += max(each.nbytes for each in given)
            return send(*args, **kwargs)

        setattr(torch.distributed, name, counted)

    def micro_batches(self, batch):
        for micro_batch in super().micro_batches(batch):
            self.num_tokens += int(row_lengths(micro_batch).sum())
            start = time.thread_time()
            yield micro_batch
            self.pass_seconds += time.thread_time() - start

    def take_counts(self) -> dict[str, Any]:
        optimizer = next(iter(self._named_optimizers.values()))
        params = list(self._params.values())
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        held = [*params, *(p.grad for p in params if p.grad is not None), *state]
        found = {
            "payload": self.payload,
            "seconds": self.pass_seconds,
            "tokens": self.num_tokens,
            "state": sum(local_data(tensor).nbytes for tensor in held),
        }
        self.payload, self.pass_seconds, self.num_tokens = 0, 0.0, 0
        return found


def write_model(folder: str, args: argparse.Namespace) -> int:
    model, tokenizer = arithmetic.build_model(
        0, max_len=256, hidden_size=args.hidden, num_layers=args.layers, num_heads=4
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def texts(num_rows: int) -> list[dict[str, str]]:
    draw = random.Random(0)
    return [
        {"text": "".join(draw.choices("0123456789+-*=", k=draw.randint(8, 200)))}
        for _ in range(num_rows)
    ]


def measure(args: argparse.Namespace, model: str, strategy: str, num: int) -> dict[str, Any]:
    """The counts of each learner of the steps after the first, and the weights after all."""
    config = SFTConfig(algo_class=SFT).language_model(model=model, mixed_precision=None)
    config.training(
        data=texts(args.rows), train_batch_size_per_learner=args.rows // num, minibatch_size=None,
        loss_on="all", lr=1e-4, adam_epsilon=1e-4, micro_batch_tokens=args.micro_batch_tokens,
        learner_class=CountingLearner, max_length=256,
    )  # fmt: skip
    config.learners(num_learners=0 if num == 1 else num, strategy=strategy)
    algorithm = config.build_algo()
    algorithm.train()
    algorithm.learner_group.foreach_learner(lambda learner: learner.take_counts())
    for _ in range(args.steps):
        algorithm.train()
    answers = algorithm.learner_group.foreach_learner(lambda learner: learner.take_counts())
    counts = [answer.get() for answer in answers]
    states = algorithm.learner_group.foreach_learner(
        lambda learner: learner.module[DEFAULT_MODULE_ID].unwrapped().get_state()
    )
    weights = next(state for state in (answer.get() for answer in states) if state)
    algorithm.stop()
    return {"counts": counts, "weights": {k: torch.as_tensor(v) for k, v in weights.items()}}


def micro_batch_tokens(
    lengths: torch.Tensor, num_learners: int, *, is_sharded: bool
) -> list[list[int]]:
    """Tokens of each micro-batch of each learner, of rows with `lengths` [B]."""
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    learner: Any = SimpleNamespace(
        world_size=num_learners, _num_parts=1, is_sharded=is_sharded,
        config=SimpleNamespace(micro_batch_size=None, micro_batch_tokens=8192),
    )  # fmt: skip
    parts = [
        SharedPasses.micro_batch_rows(learner, {columns.ATTENTION_MASK: mask}, rank)
        for rank in range(num_learners)
    ]
    return [[int(lengths[rows].sum()) for rows in mine] for mine in parts]


def balance(num_learners: int, num_rows: int) -> dict[str, Any]:
    """How evenly tokens are shared: see `--tokens` at the top."""
    draw = random.Random(0)
    by_step, by_micro_batch = [], []
    for _ in range(20):
        drawn = [round(256 * draw.lognormvariate(0.0, 0.6)) for _ in range(num_rows)]
        lengths = torch.tensor(drawn).clamp(1, 2048)
        mean = int(lengths.sum()) / num_learners
        shares = micro_batch_tokens(lengths, num_learners, is_sharded=False)
        by_step.append(max(map(sum, shares)) / mean - 1)
        shares = micro_batch_tokens(lengths, num_learners, is_sharded=True)
        slowest = (max(each) for each in itertools.zip_longest(*shares, fillvalue=0))
        by_micro_batch.append(sum(slowest) / mean - 1)
    return {
        "learners": num_learners,
        "rows": num_rows,
        "ddp": f"{max(by_step):.2%}",
        "fsdp": f"{sum(by_micro_batch) / 20:.2%}",
    }


def waiting(values: list[float]) -> float:
    """The share of its time that a learner waits for the slowest, on average."""
    return round(1 - sum(values) / len(values) / max(values), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nums", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--rows", type=int, default=64, help="of a step, of all learners")
    parser.add_argument("--steps", type=int, default=5, help="after the first")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--micro_batch_tokens", type=int, default=None)
    parser.add_argument("--tokens", action="store_true", help="count, and time nothing")
    args = parser.parse_args()
    if args.tokens:
        for num, rows in itertools.product((2, 4), (64, 256, 1024)):
            print(json.dumps(balance(num, rows)))
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    root = str(Path(__file__).resolve().parents[2])
    ray.init(
        address="local", num_cpus=max(args.nums) + 1, include_dashboard=False,
        object_store_memory=2**28, runtime_env={"env_vars": {"PYTHONPATH": root}},
    )  # fmt: skip
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = write_model(folder, args)
        alone = measure(args, folder, "ddp", 1)["weights"]
        largest = max(float(weight.abs().max()) for weight in alone.values())
        for strategy in args.strategies:
            for num in args.nums:
                found = measure(args, folder, strategy, num)
                counts, megabytes = found["counts"], 1e-6
                parts = num if strategy == "fsdp" and num > 1 else 1
                sent = 0 if num == 1 else 4 * num_parameters * (3 if strategy == "fsdp" else 1)
                gap = max(float((found["weights"][k] - alone[k]).abs().max()) for k in alone)
                line = {
                    "strategy": strategy,
                    "learners": num,
                    "parameters": num_parameters,
                    "payload_mb": round(counts[0]["payload"] / args.steps * megabytes, 2),
                    "expected_mb": round(sent * megabytes, 2),
                    "state_mb": round(max(c["state"] for c in counts) * megabytes, 2),
                    "expected_state_mb": round(16 * num_parameters / parts * megabytes, 2),
                    "waiting": waiting([c["seconds"] for c in counts]),
                    "waiting_by_tokens": waiting([c["tokens"] for c in counts]),
                    "difference": float(f"{gap / largest:.1e}"),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
