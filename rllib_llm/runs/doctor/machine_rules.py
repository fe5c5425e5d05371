"""Rules about devices, precision, the object store, ports and places for processes."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from rllib_llm.algorithms.auto_precision import AUTO
from rllib_llm.modules.model_limits import TruncatedWeightsError, num_parameters
from rllib_llm.runs.doctor.finding import Finding
from rllib_llm.runs.doctor.machine import GIB, Machine
from rllib_llm.runs.doctor.stage import Stage

SECONDS_TO_ANSWER = 3.0  # of a server
WEIGHTS_IN_STORE = 3  # versions on their way at once


def machine_rules(stage: Stage, machine: Machine, *, is_here: bool = True) -> Iterator[Finding]:
    """Findings about this machine under a stage's settings.

    Args:
        is_here: Ray will be started on this machine, rather than being a cluster elsewhere.
    """
    yield from precision_rules(stage, machine, is_here=is_here)
    if is_here:
        yield from place_rules(stage, machine)
        yield from store_rules(stage, machine)
    yield from server_rules(stage)


def precision_rules(stage: Stage, machine: Machine, *, is_here: bool) -> Iterator[Finding]:
    """Types of numbers that this machine is slow at, or that it would be fast at."""
    config = stage.config
    on_gpu = bool(config.num_gpus_per_learner or getattr(config, "num_gpus_per_env_runner", 0))
    if not is_here or on_gpu:
        return
    chosen = {"dtype": config.dtype, "mixed_precision": config.mixed_precision}
    slow = [name for name, value in chosen.items() if value in ("bfloat16", "bf16")]
    if slow and not machine.computes_bfloat16:
        yield Finding(
            "devices.bfloat16",
            "warning",
            f"{slow[0]}={chosen[slow[0]]!r}",
            "without AMX and AVX512-BF16 it is emulated, several times slower than float32",
            f"Leave {slow[0]} out, or use a GPU.",
        )
    if chosen["mixed_precision"] == AUTO:
        on = machine.computes_bfloat16
        yield Finding(
            "devices.precision", "note", f"mixed_precision='auto' is {'bf16' if on else None!r} "
            f"here: this machine {'multiplies' if on else 'would emulate'} bfloat16.", "", "",
        )  # fmt: skip
    quantised = {
        "quantization": config.quantization,
        "reference.quantization": _inner(stage.env.get("reference")),
        "reward_model.quantization": _inner(stage.env.get("reward_model")),
    }
    for name, value in quantised.items():
        if value == "nf4" and not machine.gpu_memory:
            yield Finding(
                "devices.four_bit",
                "warning",
                f"{name}='nf4' on a processor",
                "on a CPU it is slower than int8 and further from the unquantised model "
                "(KL 0.3 against 0.004 for a model of 135 M parameters)",
                f"Set {name}: int8.",
            )


def _inner(given: Any) -> str:
    return str(given.get("quantization", "none")) if isinstance(given, Mapping) else "none"


def place_rules(stage: Stage, machine: Machine) -> Iterator[Finding]:
    """Processes for which there is no device or no core of their own."""
    config = stage.config
    for name in ("num_gpus_per_learner", "num_gpus_per_env_runner"):
        wanted = float(getattr(config, name, 0) or 0)
        if wanted > len(machine.gpu_memory):
            yield Finding(
                "devices.gpus",
                "error",
                f"{name}={wanted:g}",
                "torch sees so many CUDA devices here",
                f"Set {name}: 0, look at the driver (nvidia-smi), or give --ray-address.",
                rule=f"be at most {len(machine.gpu_memory)}",
            )
    num_busy = 1 + stage.num_samplers + stage.num_learners
    if stage.num_samplers + stage.num_learners > 1 and num_busy > machine.cpus + 1:
        yield Finding(
            "ray.processes",
            "warning",
            f"{stage.num_samplers} samplers and {stage.num_learners} learners beside the trial "
            f"share {machine.cpus:g} cores",
            "processes that take turns wait for each other",
            "Lower num_env_runners; on one machine 0 or 1 is often fastest.",
        )


def store_rules(stage: Stage, machine: Machine) -> Iterator[Finding]:
    """Whether published weights fit into Ray's object store."""
    if machine.shm_bytes is None or not stage.num_samplers or stage.config.lora is not None:
        return
    folder = stage.models().get("model")
    try:
        size = num_parameters(folder) if folder else None
    except TruncatedWeightsError:
        return
    if size is None:
        return
    weights = size * (2 if stage.config.dtype == "bfloat16" else 4)
    if WEIGHTS_IN_STORE * weights > machine.shm_bytes:
        yield Finding(
            "ray.object_store",
            "warning",
            f"/dev/shm has {machine.shm_bytes / GIB:.2f} GiB free, and three versions of the "
            f"weights take {WEIGHTS_IN_STORE * weights / GIB:.2f} GiB",
            "Ray keeps what does not fit on disk, which is many times slower",
            "Enlarge it (docker run --shm-size), use bfloat16 or lora, or num_env_runners: 0.",
        )


def server_rules(stage: Stage) -> Iterator[Finding]:
    """Servers that judge or generate, and do not answer."""
    for where, url in servers(stage):
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            if not parts.hostname:
                raise OSError("it names no host")
            socket.create_connection((parts.hostname, port), SECONDS_TO_ANSWER).close()
        except OSError as error:
            yield Finding(
                "ports.server", "error", f"{where}={url!r}",
                f"{error}", "Start it, or correct the address.", rule="be a server that answers",
            )  # fmt: skip


def servers(stage: Stage) -> Iterator[tuple[str, str]]:
    """(setting, address) of every server that a stage asks."""
    functions = stage.env.get("reward_functions") or []
    for function in functions if isinstance(functions, list) else [functions]:
        kwargs = function.get("kwargs") if isinstance(function, Mapping) else None
        if isinstance(kwargs, Mapping):
            for key in ("base_url", "url"):
                if isinstance(kwargs.get(key), str):
                    yield f"reward_functions.kwargs.{key}", kwargs[key]
    engine_settings = getattr(stage.config, "engine_settings", None) or {}
    if isinstance(engine_settings.get("base_url"), str):
        yield "engine_settings.base_url", engine_settings["base_url"]
