"""Names of algorithms: the same in `Tuner("PPOPtx", ...)`, in YAML and on the command line."""

from __future__ import annotations

from typing import Any

from rllib_llm.shared.dotted import import_dotted, looks_dotted
from rllib_llm.shared.errors import Problems, did_you_mean
from rllib_llm.shared.ray_compat import register_trainable, rllib_algorithm_class

_FILES = {
    "PPOPtx": "ppo_ptx", "GRPO": "grpo", "RLOO": "rloo", "ReinforcePP": "reinforce_pp",
    "Distillation": "distillation",
    "SFT": "sft", "RewardModel": "reward_model", "DPO": "dpo", "Generate": "generate",
}  # fmt: skip
ALGORITHMS = {name: f"rllib_llm.algorithms.{file}:{name}" for name, file in _FILES.items()}


# What are settings of an algorithm here, by the letters of their names.
VARIANTS = {
    "kto": "run: DPO` with `loss_type: kto",
    "ipo": "run: DPO` with `loss_type: ipo",
    "simpo": "run: DPO` with `loss_type: sigmoid_norm` and `reference_free: true",
    "gkd": "run: Distillation` with `on_policy_share",
    "opd": "run: Distillation",
    "sdft": "run: Distillation` with `teacher: policy` and `teacher_prompt",
    "drgrpo": "run: GRPO` with `loss_reduction: dr_grpo` and `scale_by_std: false",
    "gspo": "run: GRPO` with `policy_loss: gspo",
    "cispo": "run: GRPO` with `policy_loss: cispo",
    "dapo": "run: GRPO` with `loss_reduction: token_mean`, `clip_param_high: 0.28` and `filters: "
    "[reward_spread]",
}


def get_algorithm_class(name: str) -> Any:
    """The Algorithm class called `name`: ours, RLlib's own, or a dotted path.

    Raises:
        Problems: with the nearest names.
    """
    if name in ALGORITHMS:
        return import_dotted(ALGORITHMS[name])
    if ":" in name or looks_dotted(name):
        return import_dotted(name, name="run")
    from ray.rllib.algorithms.registry import ALGORITHMS as RLLIB_ALGORITHMS

    if name in RLLIB_ALGORITHMS:
        return rllib_algorithm_class(name)
    known = (*RLLIB_ALGORITHMS, *ALGORITHMS)
    variant = VARIANTS.get("".join(filter(str.isalpha, name.lower())))
    meant = did_you_mean(name, known, 2, cutoff=0.4, otherwise="Check the spelling")
    raise Problems("run", f"be one of {[*ALGORITHMS]}, an algorithm of RLlib, or a dotted path", "",
                   f"Write `{variant}`" if variant else meant, name)  # fmt: skip


class _ByName:
    """The entry of an algorithm in Tune's registry; unpickles as its class."""

    def __init__(self, name: str):
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return get_algorithm_class, (self.name,)


def register_algorithms() -> None:
    """Registers every name with Tune; the class is imported when a trial is made of it."""
    for name in ALGORITHMS:
        register_trainable(name, _ByName(name))
