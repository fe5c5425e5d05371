"""Settings left to the hardware, decided where a run begins.

`mixed_precision: "auto"` is bf16 where learners have it; `float32_products: "auto"` is the library
that is faster on this kind of processor.

config ("auto") ─▶ here: "bf16" or None ─▶ said, built, kept in every checkpoint
                                                            │
                elsewhere, perhaps other hardware: what the checkpoint says ◀─┘
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import ray

from rllib_llm.modules.mixed_precision import cuda_multiplies_bfloat16
from rllib_llm.modules.products import faster_library
from rllib_llm.shared.process import multiplies_bfloat16

logger = logging.getLogger(__name__)
AUTO = "auto"
DECIDED = ("mixed_precision", "float32_products")  # the settings that may be "auto"


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
    if config.float32_products == AUTO:
        config = config.copy(copy_frozen=False)
        config.float32_products = faster_library()
        config.freeze()
        logger.info("float32_products='auto' is %r in this run.", config.float32_products)
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
