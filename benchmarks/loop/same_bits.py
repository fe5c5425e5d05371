"""Whether tiny runs train to the same weights, bit for bit, as those of another commit.

    python -m benchmarks.loop.same_bits [--samplers 0 1] [--only WORD] [--repeat N] > bits.txt

A line for each run: its name, and the SHA-256 of the learner's weights after three iterations.
Compare the lines of two commits on one machine with `diff`: processors round differently. Of a
schedule whose weights depend on time (`schedule="free"`) there is no line.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import torch

from rllib_llm.algorithms.grpo import GRPOConfig
from tests import forked_workers
from tests.algorithms import tiny_runs as tiny

NUM_ITERATIONS = 3
# Whether a remote sampler is tried as well: those that differ in how they sample.
EVERYWHERE, HERE = True, False


def chatty(**changes: object) -> GRPOConfig:
    """Conversations of several turns. One at a time: which turns share a step depends on time."""
    return (
        GRPOConfig()
        .environment("tests.conversations.family_models.Chatty",
                     env_config={"max_concurrent": 1})
        .language_model(model="tests.conversations.family_models.build_chatml")
        .sampling(num_completions=2, max_new_tokens=12, log_samples_every=0,
                  stop_token_ids=list(range(300, 400)))
        .training(train_batch_size_per_learner=8, ref_kl_coeff=0.0, lr=1e-3, **changes)
    )  # fmt: skip


def agents() -> GRPOConfig:
    """Episodes of an external agent, one at a time."""
    config = chatty().sampling(stop_token_ids=list(range(300, 368)))
    return config.environment("rllib_llm/Agent-v0", env_config={
        "max_concurrent": 1, "max_tokens": 700, "shuffle": False,
        "prompts": [{"prompt": f"{a} + 1?", "answer": str(a + 1)} for a in range(4)],
        "agent": "rllib_llm.examples.calculator_agent.run",
    })  # fmt: skip


def lora(folder: str) -> GRPOConfig:
    """Adapters on a model from a folder."""
    for part in tiny.build_model():
        part.save_pretrained(folder)
    config = tiny.grpo(ref_kl_coeff=0.1, lr=0.01)
    return config.language_model(model=folder, lora={"r": 4, "alpha": 8})


def ahead(**settings: object) -> GRPOConfig:
    """GRPO that samples in lockstep, one update ahead unless told otherwise."""
    config = tiny.grpo(off_policy="bypass")
    return config.streaming(**{"max_staleness": 1, **settings})


def ptx() -> GRPOConfig:
    """PPO with pretraining tokens, a critic and the reference in the environment."""
    return tiny.ppo(ref_kl_coeff=0.1, ptx_coeff=0.1, ptx_data=tiny.TEXTS, ptx_batch_size=2)


def cases(folder: str) -> Iterator[tuple[str, Callable[[], GRPOConfig], bool]]:
    """Name, config, and whether it is run with remote samplers, too."""
    spread = {"filters": ["reward_spread"]}
    yield "synchronous", tiny.grpo, EVERYWHERE
    yield "synchronous-parts", lambda: tiny.grpo().sampling(sampling_parts=2), HERE
    yield "synchronous-bf16", lambda: tiny.grpo().language_model(mixed_precision="bf16"), EVERYWHERE
    yield "synchronous-lora", lambda: lora(folder), EVERYWHERE
    yield "synchronous-chat", chatty, EVERYWHERE
    yield "synchronous-agent", agents, HERE
    yield "synchronous-ptx", ptx, EVERYWHERE
    yield "lockstep", ahead, EVERYWHERE
    yield "lockstep-bf16", lambda: ahead().language_model(mixed_precision="bf16"), HERE
    yield "lockstep-lease-2", lambda: ahead(groups_per_lease=2), EVERYWHERE
    yield "lockstep-filter", lambda: ahead(max_staleness=0, **spread), EVERYWHERE
    yield "lockstep-filter-ahead", lambda: ahead(**spread), HERE
    yield "lockstep-oversample", lambda: ahead(max_staleness=0, oversample=1.5), HERE
    chat = {"max_staleness": 1}
    yield "lockstep-chat", lambda: chatty(off_policy="bypass").streaming(**chat), EVERYWHERE


def trained(config: GRPOConfig) -> str:
    """The hash of the weights after training."""
    with tiny.built(config) as algorithm:
        for _ in range(NUM_ITERATIONS):
            algorithm.train()
        weights = tiny.weights(algorithm)
    held = hashlib.sha256()
    for name in sorted(weights):
        held.update(name.encode())
        held.update(weights[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return held.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samplers", type=int, nargs="*", default=[0, 1], help="0: in process")
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("ray", "ray.tune", "ray.rllib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    forked_workers.install()
    ray.init(address="local", num_cpus=4, object_store_memory=2**28, include_dashboard=False,
             log_to_driver=False, logging_level=logging.ERROR)  # fmt: skip
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for num_samplers in args.samplers:
            for name, config, is_remote in cases(folder):
                if args.only not in name or (num_samplers and is_remote is HERE):
                    continue
                for _ in range(args.repeat):
                    made = config().env_runners(num_env_runners=num_samplers)
                    print(f"{name}-{num_samplers}", trained(made), flush=True)
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
    ray.shutdown()


if __name__ == "__main__":
    main()
