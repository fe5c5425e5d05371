"""`mixed_precision: "auto"`: bf16 where the learners' hardware has it, decided where a run begins.

config ("auto") ─▶ here: "bf16" or None ─▶ said, built, kept in every checkpoint
                                                            │
                elsewhere, perhaps other hardware: what the checkpoint says ◀─┘
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import ray

from rllib_llm.modules.mixed_precision import cuda_multiplies_bfloat16
from rllib_llm.processor import multiplies_bfloat16

AUTO = "auto"


def decided(config: Any, on_processor: Callable[[], bool] = multiplies_bfloat16) -> str | None:
    """What `mixed_precision` of a config is on the hardware of its learners: "bf16" or None.

    on_processor: says whether this machine's processor multiplies bfloat16.
    """
    if config.mixed_precision != AUTO:
        return config.mixed_precision
    if not config.num_gpus_per_learner:
        return "bf16" if on_processor() else None
    if not config.num_learners:
        return "bf16" if cuda_multiplies_bfloat16() else None
    # This process need not see the GPUs that learners will have.
    ask = ray.remote(num_cpus=0, num_gpus=config.num_gpus_per_learner)(cuda_multiplies_bfloat16)
    return "bf16" if ray.get(ask.remote()) else None


def with_decided_precision(config: Any) -> Any:
    """The AlgorithmConfig `config`, frozen, "auto" replaced by what it is here, which is said."""
    if config.mixed_precision != AUTO:
        return config
    config = config.copy(copy_frozen=False)
    config.mixed_precision = decided(config)
    config.freeze()
    where = "GPU" if config.num_gpus_per_learner else "processor"
    what = (
        f"'bf16' in this run: the {where} multiplies bfloat16 faster than float32"
        if config.mixed_precision
        else f"None in this run, all in {config.dtype}: the {where} would emulate bfloat16"
    )
    warnings.warn(
        f"mixed_precision='auto' is {what}. It stays so wherever the run goes on.", stacklevel=2
    )
    return config
