"""What libraries say in every process that loads them and nobody can act on: hidden by default.

Importing `rllib_llm` does it, in scripts and in Ray's workers alike. `RLLIB_LLM_VERBOSE=1`, which
`rllib -v` sets, shows all of it. Of Tune's own settings those are kept that the user has made:
`RAY_AIR_NEW_OUTPUT=1` prints Tune's tables instead of our lines.
"""

from __future__ import annotations

import logging
import os

from rllib_llm.shared.tracebacks import is_verbose

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
FAILURES = "ray.tune.execution.tune_controller"  # logs what ended a trial
# Tune prints every setting and every result in tables of its new output engine, which asks nobody.
# The other one, which RLlib's own examples choose, can be told to be silent.
TUNE_OUTPUT = "RAY_AIR_NEW_OUTPUT"
TUNE_CALLBACKS = "RAY_TUNE_CALLBACKS"
PROGRESS = "rllib_llm.runs.live_table.TunerProgress"


def quiet_libraries() -> None:
    """Let those `LOGGERS` pass errors only to which nobody has given a level."""
    if is_verbose():
        return
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)
    logging.getLogger(FAILURES).addFilter(short_failure)
    os.environ.setdefault(TUNE_OUTPUT, "0")
    callbacks = [name for name in os.environ.get(TUNE_CALLBACKS, "").split(",") if name]
    if PROGRESS not in callbacks:
        os.environ[TUNE_CALLBACKS] = ",".join([*callbacks, PROGRESS])


def short_failure(record: logging.LogRecord) -> bool:
    """Replaces, in Tune's log of a trial of ours that failed, the frames of Ray and of this package
    by what a person can act on; the whole stands in the trial's error.txt. A filter of a logger."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and "rllib_llm" in str(error):
        from rllib_llm.shared.tracebacks import failure_text  # few processes have one to tell

        record.msg = failure_text(record.getMessage(), str(error))
        record.args, record.exc_info, record.exc_text = None, None, None
    return True
