"""Runs small enough for a test: a character model of 16 units, prompts judged by a function."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm.algorithms.dpo import DPOConfig
from rllib_llm.algorithms.grpo import GRPOConfig
from rllib_llm.algorithms.ppo_ptx import PPOPtxConfig
from rllib_llm.algorithms.reward_model import RewardModelConfig
from rllib_llm.algorithms.rloo import RLOOConfig
from rllib_llm.algorithms.sft import SFTConfig
from rllib_llm.config.schema import as_written, checked_config
from rllib_llm.examples import arithmetic
from rllib_llm.shared.errors import report
from tests.tiny_models import copied

HERE = "tests.algorithms.tiny_runs"
MODEL = f"{HERE}.build_model"
PROMPTS = [{"prompt": text} for text in ("1+2=", "3+44=", "5=", "17-1=", "2*3=", "9+9=")]
EVAL_PROMPTS = [{"prompt": text} for text in ("4+4=", "8-1=", "6*2=")]
TEXTS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(4) for b in range(4)]
PAIRS = [
    {"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": "-" * (1 + a % 3)} for a in range(8)
]
# Of a result, what depends on learning alone: not on time, and not on who sampled.
LEARNT = ("objective", "policy", "loss", "val", "train", "env", "rewards", "logps", "lr", "episode")


def build_model(seed: int = 3):
    size = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_len": 32}
    model = copied(lambda: arithmetic.build_model(seed, **size)[0], "tiny_runs", seed)
    return model, arithmetic.build_tokenizer()


def build_config(algo_class, settings, where: str = "config"):
    """The config that `settings` make, as a file gives them; `where`: its place in the file."""
    config, found = checked_config(algo_class, settings)
    report(as_written(problem, settings, config).within(where) for problem in found)
    return config


def build_teacher():
    """A policy of the same vocabulary, twice as wide, its weights others."""
    return arithmetic.build_model(11, hidden_size=32, num_layers=1, num_heads=2, max_len=32)


def build_mixture(**settings):
    """A mixture of six experts, two for each token, in the policy's vocabulary."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = arithmetic.build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=32, moe_intermediate_size=16,
        num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=64,
        initializer_range=0.3, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False, **settings,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Qwen3MoeForCausalLM(config).eval(), tokenizer


def build_tied_mixture():
    """The same, whose routers like three experts alike but for roundings of 16 bits."""
    model, tokenizer = build_mixture()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(5)
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight
            weight.copy_(weight[::3].repeat_interleave(3, dim=0))
            weight += 1e-3 * torch.randn_like(weight)
    return model, tokenizer


def build_classifier():
    """A reward model of the policy's shape, its head drawn anew."""
    from transformers import LlamaForSequenceClassification

    model, tokenizer = build_model(seed=5)
    config = model.config
    config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return LlamaForSequenceClassification(config).eval(), tokenizer


def build_texts():
    """`TEXTS` by name, as YAML gives data."""
    return TEXTS


def num_digits(completions):
    """Digits less other characters, a score in whole numbers that varies from row to row."""
    return [
        float(sum(1 if letter.isdigit() else -1 for letter in completion))
        for completion in completions
    ]


def _rlhf(config, **training: Any):
    settings = {
        "train_batch_size_per_learner": 12,
        "minibatch_size": 6,
        "num_epochs": 2,
        "lr": 1e-3,
        **training,
    }
    return (
        config.language_model(model=MODEL)
        .environment(
            "rllib_llm/RLHF-v0",
            env_config={
                "prompts": PROMPTS,
                "eval_prompts": EVAL_PROMPTS,
                "reward_functions": f"{HERE}.num_digits",
                "max_prompt_len": 8,
            },
        )
        .sampling(max_new_tokens=5, log_samples_every=0)
        .training(**settings)
    )


def ppo(**training: Any) -> PPOPtxConfig:
    return _rlhf(PPOPtxConfig(), **training)


def grpo(**training: Any) -> GRPOConfig:
    return _rlhf(GRPOConfig(), **training).sampling(num_completions=3)


def rloo(**training: Any) -> RLOOConfig:
    return _rlhf(RLOOConfig(), **training).sampling(num_completions=3)


def sft(**training: Any) -> SFTConfig:
    settings = {"data": TEXTS, "train_batch_size_per_learner": 6, "lr": 1e-3, **training}
    return SFTConfig().language_model(model=MODEL).training(**settings)


def reward_model(**training: Any) -> RewardModelConfig:
    settings = {"data": PAIRS, "train_batch_size_per_learner": 4, "lr": 1e-3, **training}
    return RewardModelConfig().language_model(model=MODEL).training(**settings)


def dpo(**training: Any) -> DPOConfig:
    settings = {"data": PAIRS, "train_batch_size_per_learner": 4, "lr": 1e-3, **training}
    return DPOConfig().language_model(model=MODEL).training(**settings)


def learnt(result: dict[str, Any]) -> dict[str, Any]:
    """The share of a result that depends on learning alone."""
    return {name: result[name] for name in LEARNT if name in result}


def train(algorithm, num_iterations: int) -> list[dict[str, Any]]:
    return [learnt(algorithm.train()) for _ in range(num_iterations)]


def weights(algorithm) -> dict[str, torch.Tensor]:
    """Every parameter of the first learner, copied."""
    results = algorithm.learner_group.foreach_learner(
        lambda learner: {
            name: tensor.detach().clone()
            for name, tensor in learner.module[DEFAULT_MODULE_ID].state_dict().items()
        }
    )
    return next(iter(results)).get()


def assert_same_weights(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], **tolerance: float
) -> None:
    """Bit for bit, unless a tolerance is given."""
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], **{"rtol": 0, "atol": 0, **tolerance}, msg=lambda m, n=name:
            f"{n}: {m}",
        )  # fmt: skip


@contextlib.contextmanager
def built(config) -> Iterator[Any]:
    """The algorithm of `config`, stopped and its log folder removed at the end."""
    algorithm = config.build_algo()
    try:
        yield algorithm
    finally:
        algorithm.stop()
        shutil.rmtree(algorithm.logdir, ignore_errors=True)
