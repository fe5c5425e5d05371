"""What libraries say in every process that loads them and nobody can act on: hidden by default.

Importing `rllib_llm` does it, in scripts and in Ray's workers alike. `RLLIB_LLM_VERBOSE=1`, which
`rllib -v` sets, shows all of it.
"""

from __future__ import annotations

import logging
import os

VERBOSE = "RLLIB_LLM_VERBOSE"
# Kernels that were built for other machines, enums of PyTorch's own, arguments that RLlib passes to
# itself, and how long a trial's set-up took.
LOGGERS = (
    "torchao",
    "torch.utils._pytree",
    "bitsandbytes",
    "ray._common.deprecation",
    "ray.rllib.utils.deprecation",
    "ray.tune.trainable.trainable",
    "ray.tune.utils.util",
)


def is_verbose() -> bool:
    """Whether all that libraries say is to be shown."""
    return os.environ.get(VERBOSE, "0") not in ("", "0")


def quiet_libraries() -> None:
    """Let those `LOGGERS` pass errors only to which nobody has given a level."""
    if is_verbose():
        return
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)
