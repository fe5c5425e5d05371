"""Small runs with one remote sampler in which one part is slow: a judge, a tool, a learner or a
transport of weights that sleeps, or one sampler for the work of eight."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rllib_llm import GRPOConfig
from rllib_llm.examples import arithmetic, calculator
from rllib_llm.learners.policy_learners import GRPOLearner
from rllib_llm.overseer.phases import STARTING, Diagnosis, diagnose
from rllib_llm.weights.flat_buffer import FlatBuffer
from rllib_llm.weights.transport import StoreTransport

HERE = "tests.overseer.bottlenecks"
SLOW_S = 2.0  # that the staged part sleeps, each time
PROMPTS = [{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)]
PARTS = 8  # of a request, where samplers are few
LONG = 48  # tokens, so that sampling takes longer than learning
UNMEASURED = "starved"  # a share that is none of a phase
HIDDEN_SIZE = 32


# --- what is slow ---------------------------------------------------------------------------------


def judge(completions: list[str]) -> list[float]:
    return [float(sum(letter.isdigit() for letter in text)) for text in completions]


def slow_judge(completions: list[str]) -> list[float]:
    time.sleep(SLOW_S)
    return judge(completions)


class SlowLearner(GRPOLearner):
    """Sleeps in each update."""

    def update(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        time.sleep(SLOW_S)
        return super().update(*args, **kwargs)


class SlowTransport:
    """The object store's, whose receivers sleep before they have the weights."""

    def __init__(self) -> None:
        self._store = StoreTransport()

    def export(self, tensors: dict[str, torch.Tensor], *, checksum: bool = False) -> Any:
        return self._store.export(tensors, checksum=checksum)

    @contextmanager
    def open(self, ticket: Any) -> Iterator[FlatBuffer]:
        time.sleep(SLOW_S)
        with self._store.open(ticket) as flat:
            yield flat


class SlowCalculator(calculator.Calculator):
    """Its tool sleeps."""

    def tools(self) -> list[Callable]:
        return [slow_calculator]


def slow_calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: such as "3 * (4 + 5)".
    """
    time.sleep(SLOW_S)
    return calculator.calculator(expression)


slow_calculator.__name__ = "calculator"  # as the model calls it


def build_model() -> Any:
    return arithmetic.build_model(3, hidden_size=32, num_layers=1, num_heads=2, max_len=96)


def build_calling_model() -> Any:
    """A model whose next token is a function of the last: it calls the calculator, always."""
    tokenizer = calculator.build_tokenizer()
    turn = ["<tool_call>", '{"name": "', "calculator", '", "arguments": ', '{"expression": "', "1",
            '"}}', "</tool_call>", tokenizer.eos_token]  # fmt: skip
    ids = tokenizer.convert_tokens_to_ids(turn)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HIDDEN_SIZE, intermediate_size=HIDDEN_SIZE,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=128, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    follows = torch.full((len(tokenizer),), ids[0])
    follows[ids[:-1]] = torch.tensor(ids[1:])
    with torch.no_grad():
        layer = model.model.layers[0]
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), HIDDEN_SIZE))
        model.lm_head.weight.zero_()
        model.lm_head.weight[follows, torch.arange(len(tokenizer))] = 10.0
    return model, tokenizer


# --- the runs -------------------------------------------------------------------------------------


def sums(reward: str = "judge") -> dict[str, Any]:
    """Settings of an environment."""
    return {"prompts": PROMPTS, "reward_functions": f"{HERE}.{reward}", "max_prompt_len": 8}


def plain(
    env: str = "rllib_llm/RLHF-v0",
    env_config: dict[str, Any] | None = None,
    model: str = "build_model",
    max_new_tokens: int = 4,
) -> GRPOConfig:
    """A run in which nothing is slow."""
    return (
        GRPOConfig()
        .language_model(model=f"{HERE}.{model}")
        .environment(env, env_config=env_config or sums())
        .env_runners(num_env_runners=1)
        .sampling(num_completions=3, max_new_tokens=max_new_tokens, log_samples_every=0)
        .training(train_batch_size_per_learner=24, minibatch_size=24, lr=1e-6)
    )


def with_slow_judge() -> GRPOConfig:
    return plain(env_config=sums("slow_judge"))


def with_slow_tool() -> GRPOConfig:
    return plain(
        f"{HERE}.SlowCalculator", {"max_turns": 2}, "build_calling_model", max_new_tokens=40
    )


def with_slow_learner() -> GRPOConfig:
    return plain().learners(learner_class=SlowLearner)


def with_few_samplers() -> GRPOConfig:
    return plain(max_new_tokens=LONG).sampling(sampling_parts=PARTS, min_new_tokens=LONG)


def with_slow_weights() -> GRPOConfig:
    return plain().weights(transport=f"{HERE}.SlowTransport")


@dataclass(frozen=True)
class Stage:
    """A bottleneck, and the verdict and longest phase that it is to be recognised by."""

    make: Callable[[], GRPOConfig]
    bound: str
    words: str  # in the diagnosis


STAGES: Mapping[str, Stage] = MappingProxyType({
    "judge": Stage(with_slow_judge, "judge", "waiting for judges"),
    "tool": Stage(with_slow_tool, "judge", "waiting for tools"),
    "learner": Stage(with_slow_learner, "learner", "goes into learning"),
    "samplers": Stage(with_few_samplers, "sampler", "num_env_runners"),
    "weights": Stage(with_slow_weights, "weights", "waiting for weights"),
})  # fmt: skip


def staged(config: GRPOConfig, num_iterations: int) -> tuple[Diagnosis, float]:
    """The diagnosis of a run, and how far from 1 the shares of an iteration are, at most."""
    algorithm = config.build_algo()
    try:
        results = [algorithm.train() for _ in range(num_iterations)]
        seconds = algorithm.oversight.recent_seconds()
        found = diagnose({part: s for part, s in seconds.items() if part != STARTING})
    finally:
        algorithm.stop()
    shares = [result["time_share"] for result in results]
    sums = [sum(v for name, v in one.items() if name != UNMEASURED) for one in shares]
    return found, max(abs(total - 1) for total in sums)
