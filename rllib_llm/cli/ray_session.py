"""Ray for the length of a command: quiet, without dashboard, with a bounded object store."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rllib_llm.cli.errors import UserError

OBJECT_STORE_BYTES = 512 * 1024**2
MAX_OBJECT_STORE_SHARE = 0.3  # of the machine's memory, Ray's own default


@dataclass(frozen=True)
class RayOptions:
    """What the command line says about Ray; None leaves the choice to Ray."""

    address: str | None = None
    num_cpus: int | None = None
    num_gpus: int | None = None
    object_store_memory: int | None = None
    verbosity: int = 0


def quiet_environment(verbosity: int = 0) -> None:
    """Set the environment that keeps Ray's driver and workers quiet. Call before importing Ray.

    Values that the user has set are kept.
    """
    defaults = {
        # Ray hides GPUs from actors that ask for none, in future versions no longer: it warns.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Relative paths in a config mean the folder the command was started in.
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "RAY_AIR_NEW_OUTPUT": "0",
        "RAY_DEDUP_LOGS": "1",
        "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore::DeprecationWarning,ignore::FutureWarning",
    }
    if verbosity == 0:
        defaults["RAY_BACKEND_LOG_LEVEL"] = "fatal"
        defaults["TRANSFORMERS_VERBOSITY"] = "error"
        defaults["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def ray_session(options: RayOptions, needed_cpus: float = 1) -> Iterator[dict[str, Any]]:
    """Connect to Ray, or start it here, and yield the cluster's resources.

    A Ray that already runs in this process is used and left running.

    Args:
        options: what the command line says.
        needed_cpus: CPUs that one trial reserves. A local Ray is given at least so many, since they
            are slots for processes, not cores; on fewer cores the processes take turns.
    """
    import ray

    if ray.is_initialized():
        yield ray.cluster_resources()
        return
    level = (logging.ERROR, logging.INFO, logging.DEBUG)[min(options.verbosity, 2)]
    for name in ("ray", "ray.tune", "ray.rllib", "ray.train"):
        logging.getLogger(name).setLevel(level)
    arguments: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": options.verbosity > 0,
        "logging_level": level,
        "configure_logging": True,
    }
    if options.address:
        arguments = {k: v for k, v in arguments.items() if k != "include_dashboard"}
        arguments["address"] = options.address
        if options.num_cpus is not None or options.num_gpus is not None:
            raise UserError(
                f"--ray-num-cpus and --ray-num-gpus must be left out with --ray-address="
                f"{options.address!r}: a running cluster has its resources already. Drop them."
            )
    else:
        arguments |= {
            "address": "local",
            "num_cpus": options.num_cpus or max(os.cpu_count() or 1, int(-(-needed_cpus // 1))),
            "num_gpus": options.num_gpus,
            "object_store_memory": options.object_store_memory or _object_store_bytes(),
        }
    try:
        ray.init(**arguments)
    except ConnectionError as error:
        raise UserError(
            f"--ray-address={options.address!r} must be a running Ray cluster: {error}. "
            "Start one with `ray start --head`, or leave the option out."
        ) from error
    try:
        yield ray.cluster_resources()
    finally:
        ray.shutdown()


def _object_store_bytes() -> int:
    """Return the size of a local object store: small, but never more than /dev/shm holds."""
    import psutil

    bound = int(psutil.virtual_memory().available * MAX_OBJECT_STORE_SHARE)
    return max(80 * 1024**2, min(OBJECT_STORE_BYTES, bound))
