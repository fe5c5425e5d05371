"""Reinforcement learning from feedback for language models, as ordinary parts of Ray RLlib.

Importing it registers the environments `rllib_llm/...` with gymnasium and RLlib, and the
algorithms with Tune, in this process; Ray's workers import it when they unpickle a config.
"""

from __future__ import annotations

import importlib
from typing import Any

from rllib_llm.algorithms.registry import register_algorithms
from rllib_llm.envs.registry import register_envs
from rllib_llm.shared.errors import did_you_mean
from rllib_llm.shared.messages import quiet_libraries

__version__ = "0.1.0"

# Public names, each imported from its module when it is first used: importing this package costs
# little more than importing Ray.
_PUBLIC = {
    "PPOPtxConfig": "rllib_llm.algorithms.ppo_ptx",
    "GRPOConfig": "rllib_llm.algorithms.grpo",
    "RLOOConfig": "rllib_llm.algorithms.rloo",
    "ReinforcePPConfig": "rllib_llm.algorithms.reinforce_pp",
    "DistillationConfig": "rllib_llm.algorithms.distillation",
    "SFTConfig": "rllib_llm.algorithms.sft",
    "RewardModelConfig": "rllib_llm.algorithms.reward_model",
    "GenerateConfig": "rllib_llm.algorithms.generate",
    "DPOConfig": "rllib_llm.algorithms.dpo",
    "BanditEnv": "rllib_llm.envs.bandit",
    "check_env": "rllib_llm.envs.check_env",
    "default_callbacks": "rllib_llm.runs",
    "serve": "rllib_llm.serving.deployment",
}
__all__ = [*(name for name in _PUBLIC if name != "serve"), "__version__"]  # that is of an extra


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    meant = did_you_mean(name, _PUBLIC, 2, cutoff=0.5, otherwise=f"It has {', '.join(_PUBLIC)}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. {meant}")


def __dir__() -> list[str]:
    return sorted([*_PUBLIC, "__version__"])


quiet_libraries()
register_envs()
register_algorithms()
