"""The task of a peer's benchmark script (`bench_trl.py`), set up for our algorithms.

The script trains TRL's GRPO, RLOO and PPO on a language it makes itself, and can be imported
without TRL. Tokenizer, models, prompts and reward are its own; batch, mini-batch, epochs, lengths,
learning rate, optimiser and clipping those with which it calls TRL.
"""

from __future__ import annotations

import importlib
import math
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rllib_llm import GRPOConfig, PPOPtxConfig, RLOOConfig

CONFIGS = {"grpo": GRPOConfig, "rloo": RLOOConfig, "ppo": PPOPtxConfig}
# What TRL does differently from our defaults, by trainer. RLOO: the loss is that of whole
# completions. PPO: a critic of its own from the reward model, no gradient clipping.
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_reduction": "sequence_mean", "ref_kl_in": "loss", "ref_kl_estimator": "k3"},
    "rloo": {"loss_reduction": "sequence_mean", "policy_loss": "rloo"},
    "ppo": {"critic": "separate", "grad_clip": None, "vf_loss_coeff": 0.1, "lambda_": 0.95},
}
MEAN_LENGTH = 24  # tokens after which EOS ends a completion of the model of mixed lengths


@dataclass(frozen=True)
class Task:
    """Sizes of one iteration; lengths in tokens, `group` completions of a prompt."""

    algo: str
    beta: float
    seed: int = 0
    prompt_len: int = 16
    completion_len: int = 32
    batch: int = 64
    group: int = 8
    minibatch: int = 32
    epochs: int = 2
    lr: float = 3e-4
    reward: str = "lex"
    critic: str = "separate"
    mixed_precision: str | None = None  # of ours; frozen models follow it


def make_config(bench: Any, folder: Path, task: Task) -> Any:
    """Our config of `task` for the models in `folder` ("policy", and "rm" for PPO)."""

    def lexicon(completions: list[str], **columns: Any) -> list[float]:
        return bench.reward_texts(completions, task.reward)

    prompts = bench.build_prompts(bench.load_tokenizer(), 512, task.prompt_len)
    env_config: dict[str, Any] = {
        "prompts": [{"prompt": prompt} for prompt in prompts],
        "reward_functions": [{"function": lexicon, "name": "lexicon"}],
        "max_prompt_len": task.prompt_len,
        "max_completion_len": task.completion_len,
    }
    settings = dict(SETTINGS[task.algo])
    if task.algo == "ppo":  # learns from the learned judge; the true score is only read
        judge = str(folder / "rm")
        settings["critic"] = task.critic
        if task.critic == "separate":
            settings["critic_model"] = judge
        env_config["reward_model"] = {"model": judge, "normalize": False}
        env_config["reward_functions"][0]["weight"] = 0.0
    settings.setdefault("grad_clip", 1.0)
    config = CONFIGS[task.algo]().environment("rllib_llm/RLHF-v0", env_config=env_config)
    return (
        config.language_model(model=str(folder / "policy"), mixed_precision=task.mixed_precision)
        .sampling(
            num_completions=1 if task.algo == "ppo" else task.group,
            max_new_tokens=task.completion_len,
            log_samples_every=0,
        )
        .training(
            train_batch_size_per_learner=task.batch,
            minibatch_size=task.minibatch,
            num_epochs=task.epochs,
            lr=task.lr,
            adam_epsilon=1e-8,
            ref_kl_coeff=task.beta,
            **settings,
        )
        .debugging(seed=task.seed)
    )


def import_bench(bench_dir: str) -> Any:
    """The peer's script as a module; its models lie where RLHF_ASSETS says."""
    # The script limits an unlimited address space to less than Ray maps; it leaves other limits.
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 42, resource.RLIM_INFINITY))
    sys.path.insert(0, bench_dir)
    return importlib.import_module("bench_trl")


def model_folders(bench: Any, folder: Path, names: dict[str, str]) -> None:
    """Copies of the script's models with the tokenizer beside them, as every model folder has it.

    names: ours ("policy", "rm") to the script's.
    """
    for ours, theirs in names.items():
        shutil.copytree(Path(bench.ASSETS) / theirs, folder / ours)
        bench.load_tokenizer().save_pretrained(folder / ours)


def make_mixed_assets(bench: Any, folder: Path, vocab: int, hidden: int, layers: int) -> None:
    """Models of the script's own form whose completions end at mixed lengths, for its `--init sft`.

    Random weights, but EOS has the probability 1 / MEAN_LENGTH at every token: one number of the
    hidden state is about constant, and EOS alone reads it. The tokenizer is the script's with
    words added up to `vocab`.
    """
    tokenizer = bench.load_tokenizer()
    tokenizer.add_tokens([f"word{i}" for i in range(vocab - len(tokenizer))])
    tokenizer.save_pretrained(folder / "tok")
    torch.manual_seed(0)
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(bench.build_config(hidden, layers, vocab))
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        states = model.model(input_ids=torch.randint(3, vocab, (8, 64))).last_hidden_state
        others = (states @ model.lm_head.weight.T).logsumexp(dim=-1).mean()
        model.lm_head.weight[2] = 0.0
        log_odds = others - math.log(MEAN_LENGTH - 1)
        model.lm_head.weight[2, 0] = log_odds / states[..., 0].mean()
    model.save_pretrained(folder / f"sft_{hidden}_{layers}")
