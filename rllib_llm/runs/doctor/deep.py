"""Checks that need the model: two iterations with all their measurements."""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rllib_llm.algorithms.language_model_config import decided
from rllib_llm.runs.doctor.stage import Finding, Stage

NUM_ITERATIONS = 2
MAX_GAP = {"float32": 1e-3, "bfloat16": 0.05}  # nats per token between decoding and learning
SLOW_SWAP = 0.1  # share of an iteration that publishing and loading weights may take
DIALOGUE = (
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "It is 6."},
)


def deep_rules(stage: Stage) -> Iterator[Finding]:
    """Findings of two iterations in this process, and of proofs on the tokenizer."""
    yield from chat_rules(stage)
    yield from oracle_rules(stage)
    results = two_iterations(stage)
    last = results[-1]
    throughput = last.get("throughput", {})
    seconds = throughput.get("iteration_seconds") or last.get("time_this_iter_s", math.nan)
    yield Finding(
        "deep.seconds", "note", f"an iteration takes {seconds:.1f} s here, in one process",
        _whole_run(stage, seconds), "",
    )  # fmt: skip
    if stage.is_rlhf:
        yield from _sampled(stage, last, seconds)


def two_iterations(stage: Stage) -> list[dict[str, Any]]:
    """Results of two iterations with sampler and learner in this process, as large as the run's."""
    config = stage.config.copy(copy_frozen=False)
    config.num_learners = 0
    config.evaluation_interval = None
    if stage.is_rlhf:
        config.num_env_runners = 0
        config.pipeline_depth = 0
        config.weights_transport = "store"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        algorithm = config.build_algo()
        try:
            return [algorithm.train() for _ in range(NUM_ITERATIONS)]
        finally:
            algorithm.stop()
            shutil.rmtree(Path(algorithm.logdir), ignore_errors=True)


def _whole_run(stage: Stage, seconds: float) -> str:
    iterations = stage.num_planned_iterations
    if iterations is None or math.isnan(seconds):
        return ""
    return f"{iterations} of them take about {iterations * seconds / 3600:.1f} h."


def _sampled(stage: Stage, result: Mapping[str, Any], seconds: float) -> Iterator[Finding]:
    """An iteration's results about sampling: log-probs, weights, rewards."""
    gap = result.get("sampler", {}).get("logprob_gap")
    config = stage.config
    kind = "bfloat16" if config.dtype == "bfloat16" or decided(config) else "float32"
    if gap is not None:
        exact = gap <= MAX_GAP[kind]
        yield Finding(
            "deep.logprobs",
            "note" if exact else "error",
            f"gap between log-probs of decoding and of a forward pass={gap:.2g} nats per token",
            "" if exact else "the ratio is not 1 on policy, and the wrong policy is corrected",
            "" if exact else "Use engine='torch', dtype float32, or another model.",
            rule="" if exact else f"be within {MAX_GAP[kind]:g} in {kind}",
        )
    throughput = result.get("throughput", {})
    swap = throughput.get("publish_seconds", 0.0)
    slow = swap > SLOW_SWAP * seconds
    yield Finding(
        "deep.swap",
        "warning" if slow else "note",
        f"publishing weights takes {swap:.2f} s of an iteration of {seconds:.1f} s",
        "it should be a small part" if slow else "",
        "Use lora or dtype bfloat16." if slow else "",
    )
    spread = result.get("objective", {}).get("scores_std")
    if spread == 0:
        yield Finding(
            "deep.rewards", "warning", "every completion of two iterations got the same reward",
            "there is nothing to learn from",
            "Look at reward functions and prompts; raise temperature or max_new_tokens.",
        )  # fmt: skip


def chat_rules(stage: Stage) -> Iterator[Finding]:
    """Whether the chat template only appends, so that a continued conversation extends its
    tokens."""
    from rllib_llm.data.encoding import render

    tokenizer = stage.config.load_tokenizer()
    if not tokenizer.chat_template:
        return
    whole = render(tokenizer, DIALOGUE)
    so_far = render(tokenizer, DIALOGUE[:2])
    opened = render(tokenizer, DIALOGUE[:3], generation_prompt=True)
    appends = whole.startswith(so_far) and whole.startswith(opened)
    yield Finding(
        "deep.chat_format", "note" if appends else "warning",
        "the chat template appends" if appends else "the chat template changes earlier turns",
        "" if appends else "a conversation of several turns does not keep its tokens",
        "" if appends else "Give one that renders turns alike wherever they stand: chat_template.",
    )  # fmt: skip


def oracle_rules(stage: Stage) -> Iterator[Finding]:
    """Whether rewards prefer a row's own answer to another row's, where rows have answers."""
    from rllib_llm.runs.doctor.reward_rules import answer_scores

    scores = answer_scores(stage) if stage.is_rlhf else None
    if scores is None:
        return
    right, wrong = scores
    told = right > wrong
    yield Finding(
        "deep.oracle", "note" if told else "warning",
        f"rewards give {right:.3g} to the rows' own answers and {wrong:.3g} to each other's",
        "" if told else "right answers should get more",
        "" if told else "Look at the reward functions: how do they find the answer in a text?",
    )  # fmt: skip
