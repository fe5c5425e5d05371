"""The machine: its facts, gathered once, and rules about devices, precision, ports, memory and the
installation (tested versions, conflicting packages, whether Ray starts).

Memory is what the processes of a stage hold, by the sizes of models, without activations.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.version import Version

from rllib_llm.algorithms.language_model_config import AUTO
from rllib_llm.modules.model_source import TruncatedWeightsError, num_parameters
from rllib_llm.runs.doctor.stage import Stage, of_each_env, parts_of
from rllib_llm.shared.dotted import as_list, named_model
from rllib_llm.shared.errors import Problem, note, warning
from rllib_llm.shared.process import (
    free_memory,
    multiplies_bfloat16,
    processor_features,
    usable_cores,
)

GIB = 1024**3


@dataclass(frozen=True)
class Machine:
    """Facts about the machine for rules about resources; bytes unless said otherwise.

    cpus: that this process may use: affinity, and the quota of its control group.
    features: of the processor, as Linux names them ("amx_bf16", "avx512_bf16", ...).
    gpu_memory: of each CUDA device.
    shm_bytes: free in /dev/shm, where Ray keeps its object store; None: there is no such folder.
    disk_bytes: free where results go.
    versions: installed packages, by lower-case name.
    """

    cpus: float = 1.0
    memory: int = 0
    features: frozenset[str] = frozenset()
    gpu_memory: tuple[int, ...] = ()
    shm_bytes: int | None = None
    disk_bytes: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls, folder: Path) -> Machine:
        """This machine, with results going to `folder`."""
        import torch

        existing = next(path for path in (folder, *folder.parents) if path.exists())
        shm, gpus = Path("/dev/shm"), range(0)
        if os.environ.get("CUDA_VISIBLE_DEVICES") != "" and torch.cuda.is_available():
            gpus = range(torch.cuda.device_count())
        versions = {
            name.lower().replace("_", "-"): found.version
            for found in reversed([*importlib.metadata.distributions()])  # the first counts
            if (name := found.metadata["Name"])
        }
        return cls(
            cpus=usable_cores(), memory=free_memory(), features=processor_features(),
            gpu_memory=tuple(torch.cuda.get_device_properties(i).total_memory for i in gpus),
            shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else None,
            disk_bytes=shutil.disk_usage(existing).free, versions=versions,
        )  # fmt: skip

    @property
    def computes_bfloat16(self) -> bool:
        """Whether products of bfloat16 are faster than of float32 here."""
        return multiplies_bfloat16(self.features) or bool(self.gpu_memory)


SECONDS_TO_ANSWER = 3.0  # of a server


def machine_rules(stage: Stage, machine: Machine, *, is_here: bool = True) -> Iterator[Problem]:
    """Problems of this machine under a stage's settings.

    Args:
        is_here: Ray will be started on this machine, rather than being a cluster elsewhere.
    """
    for rule in (memory_rules, precision_rules, place_rules) if is_here else ():
        yield from rule(stage, machine)
    yield from server_rules(stage)
    if stage.is_rlhf and stage.config.envs:
        yield from of_each_env(server_rules, stage)


def precision_rules(stage: Stage, machine: Machine) -> Iterator[Problem]:
    """Types of numbers that this machine is slow at, or that it would be fast at."""
    config = stage.config
    on_gpu = bool(config.num_gpus_per_learner or getattr(config, "num_gpus_per_env_runner", 0))
    if on_gpu:
        return
    chosen = {"dtype": config.dtype, "mixed_precision": config.mixed_precision}
    slow = [name for name, value in chosen.items() if value in ("bfloat16", "bf16")]
    if slow and not machine.computes_bfloat16:
        yield warning(slow[0], "be left out",
                      "without AMX and AVX512-BF16 it is emulated, several times "
                      "slower than float32", "Use a GPU for it", chosen[slow[0]])  # fmt: skip
    if chosen["mixed_precision"] == AUTO:
        on = machine.computes_bfloat16
        yield note(f"mixed_precision='auto' is {'bf16' if on else None!r} here: this machine "
                   f"{'multiplies' if on else 'would emulate'} bfloat16")  # fmt: skip
    of_models = {name: stage.env.get(name) for name in ("reference", "reward_model")}
    quantised = {"quantization": config.quantization} | {
        f"{name}.quantization": given.get("quantization")
        for name, given in of_models.items() if isinstance(given, Mapping)
    }  # fmt: skip
    for name, value in quantised.items():
        if value == "nf4" and not machine.gpu_memory:
            why = "nf4 is slower there, and its KL from the model 0.3 against 0.004 (135 M)"
            yield warning(name, "be int8 on a processor", why, "", value)


def place_rules(stage: Stage, machine: Machine) -> Iterator[Problem]:
    """Processes for which there is no device or no core of their own."""
    config = stage.config
    for name in ("num_gpus_per_learner", "num_gpus_per_env_runner"):
        wanted = float(getattr(config, name, 0) or 0)
        if wanted > len(machine.gpu_memory):
            rule = f"be at most {len(machine.gpu_memory)}, the CUDA devices that torch sees here"
            remedy = "Look at the driver (nvidia-smi), or give --ray-address"
            yield Problem(name, rule, "", remedy, wanted)
    num_busy = 1 + stage.num_samplers + stage.num_learners
    if stage.num_samplers + stage.num_learners > 1 and num_busy > machine.cpus + 1:
        rule = f"leave each process one of the {machine.cpus:g} cores"
        remedy = "Lower it; on one machine 0 or 1 is often fastest"
        why = f"with the trial and {stage.num_learners} learners they take turns"
        yield warning("num_env_runners", rule, why, remedy, stage.num_samplers)


def server_rules(stage: Stage) -> Iterator[Problem]:
    """Servers that judge or generate, and do not answer."""
    named = [
        (f"reward_functions.kwargs.{key}", function["kwargs"].get(key))
        for function in as_list(stage.env.get("reward_functions"))
        if isinstance(function, Mapping) and isinstance(function.get("kwargs"), Mapping)
        for key in ("base_url", "url")
    ]
    settings = getattr(stage.config, "engine_settings", None) or {}
    named.append(("env_config.base_url", stage.env.get("base_url")))  # of a player, in Chat-v0
    if not stage.entry:  # one for all
        named.append(("engine_settings.base_url", settings.get("base_url")))
    for where, url in named:
        if not isinstance(url, str):
            continue
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            if not parts.hostname:
                raise OSError("it names no host")
            socket.create_connection((parts.hostname, port), SECONDS_TO_ANSWER).close()
        except OSError as error:
            yield Problem(where, "be a server that answers", str(error),
                          "Start it, or correct the address", url)  # fmt: skip


PROCESS_BYTES = int(0.5 * GIB)  # Python with torch, transformers and Ray
# Bytes of a parameter of a frozen model.
FROZEN_BYTES = {"none": 4.0, "bf16": 2.0, "int8": 1.1, "nf4": 0.6}
ADAM_BYTES = 8.0  # two moments in float32
TIGHT = 0.8  # of the memory


def memory_rules(stage: Stage, machine: Machine) -> Iterator[Problem]:
    """The memory of each kind of process of a stage, against that of the machine, on GPUs of
    the smallest; published weights against Ray's object store; models of unknown size count as
    nothing."""
    config, parts = stage.config, [*parts_of(stage)]
    sizes: dict[str, dict[str, int]] = {}
    is_whole = True
    for part in {part.entry: part for part in (stage, *parts)}.values():
        of_part = sizes[part.entry] = {}
        for name, path in part.models().items():
            try:
                of_part[name] = num_parameters(path) or 0
            except TruncatedWeightsError:  # a finding of its own
                is_whole = False
    policy, num_learners = sizes[""].get("model", 0), max(1, stage.num_learners)
    if machine.shm_bytes is not None and stage.num_samplers and not config.lora:
        num_versions = config.weights_keep + 1  # one more while it is published
        weights = num_versions * policy * _item_bytes(config)
        if weights > machine.shm_bytes:
            rule = f"hold {num_versions} versions of the weights ({weights / GIB:.2f} GiB)"
            why = f"{machine.shm_bytes / GIB:.2f} GiB are free; Ray keeps the rest on disk, slowly"
            yield warning("/dev/shm", rule, why, "docker run --shm-size, or use bfloat16 or lora")
    if not is_whole:
        return
    learner = PROCESS_BYTES + _learner_bytes(stage, policy)
    shares = [("learner", num_learners, learner)]  # process, how many of them, bytes of each
    if stage.is_rlhf:
        rules, own = config.stream_rules(), PROCESS_BYTES + policy * _computing_bytes(config)
        samplers = (rules.envs_of(str(i + 1)) for i in range(stage.num_samplers))
        for envs, count in Counter(samplers).items() or [(None, 0)]:
            opened = [(part, sizes[part.entry]) for i, part in enumerate(parts)
                      if part.num_prompts and (envs is None or i in envs)]  # fmt: skip
            sampler = _sampler_bytes(stage, policy, opened)
            if not count:
                shares = [("process", 1, learner + sampler)]
            else:
                shares.append(("sampler", count, own + sampler))
    if not machine.memory:
        return
    said = ", ".join(
        f"{count} {process}{'s' * (count > 1)} with {size / GIB:.1f} GiB"
        for process, count, size in shares
    )
    if config.num_gpus_per_learner and machine.gpu_memory:
        held, have, what = shares[0][2], min(machine.gpu_memory), "a GPU's memory"
    else:
        held, have = sum(count * size for _, count, size in shares), machine.memory
        what = "the free memory"
    if held > TIGHT * have:
        yield Problem(said, f"fit into {what} ({have / GIB:.1f} GiB)",
                      f"{held / GIB:.1f} GiB are needed before activations",
                      "Lower num_env_runners, use " "lora, bfloat16 or a quantised reference",
                      severity="error" if held > have else "warning")  # fmt: skip


def _learner_bytes(stage: Stage, policy: int) -> float:
    """Weights, gradients and optimiser."""
    config = stage.config
    item = _item_bytes(config)
    if config.lora is not None:
        item = _computing_bytes(config)
        kept = FROZEN_BYTES[config.quantization] if config.quantization != "none" else item
        return policy * kept * 1.02  # adapters are hundredths of it
    copies = 2.0 if config.mixed_precision and item == 4 else 0.0
    sharded = stage.num_learners if config.learner_strategy == "fsdp" else 1
    learner = policy * (2 * item + ADAM_BYTES + copies) / max(1, sharded)
    return 2 * learner if getattr(config, "critic", "none") == "separate" else learner


def _sampler_bytes(
    stage: Stage, policy: int, parts: Sequence[tuple[Stage, Mapping[str, int]]]
) -> float:
    """KV cache and frozen models; of several environments, which have each its `sizes`, as many and
    as long rows as any has, and all frozen models, those that are alike once."""
    from rllib_llm.modules.model_source import text_config

    config, total = stage.config, 0.0
    if policy:
        model: Any = text_config(config.pretrained_model)
        heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
        size = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
        most = max(part.config.num_completions for part, _ in parts)
        own = dict(zip(config.env_names, config.samplers_of_envs(), strict=True))
        rows = most * sum(part.num_prompts / (len(own[part.entry]) or max(1, stage.num_samplers))
                          for part, _ in parts)  # fmt: skip
        rows = min(rows, getattr(config, "sampling_batch_size", None) or rows)
        tokens = max(part.env.get("max_prompt_len", 0) + part.config.max_new_tokens
                     for part, _ in parts)  # fmt: skip
        of_token = model.num_hidden_layers * 2 * heads * size * _computing_bytes(config)
        total = float(rows * tokens * of_token)
    frozen: dict[tuple[str, ...], float] = {}
    for part, sizes in parts:
        named = {name: part.env.get(name) for name in ("reward_model", "reference")}
        if named["reference"] is None and config.ref_kl_coeff and config.lora is None:
            named["reference"] = config.pretrained_model
        if config.distill_coeff and config.teacher_in == "environment":
            named["teacher"] = part.config.teacher
        for name, given in named.items():
            if given is not None:
                settings = named_model(given)
                default = "bf16" if config.mixed_precision else "none"
                kept = str(settings.get("quantization", default))
                size = sizes.get(name) or (policy if name == "reference" else 0)
                kind = "judge" if name == "reward_model" else "causal"
                frozen[kind, str(settings.get("model")), kept] = size * FROZEN_BYTES.get(kept, 4.0)
    return total + sum(frozen.values())


def _item_bytes(config: Any) -> int:
    return 2 if config.dtype == "bfloat16" else 4


def _computing_bytes(config: Any) -> int:
    return 2 if config.mixed_precision else _item_bytes(config)


# What CI runs with; a test holds it to constraints.txt.
TRIED: Mapping[str, str] = {
    "ray": "2.60.0",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "gymnasium": "1.2.2",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
    "torchao": "0.18.0",
    "datasets": "5.2.0",
}


def installation_rules(
    versions: Mapping[str, str], requirements: Sequence[str] | None = None
) -> Iterator[Problem]:
    """Problems of the packages that this one requires; `pip check` compares all that are installed.

    Args:
        versions: installed, by lower-case name.
        requirements: of this package; by default those that it was installed with.
    """
    own = "rllib-llm"
    if requirements is None:
        requirements = importlib.metadata.requires(own) if own in versions else None
    for requirement in map(Requirement, requirements or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, wanted = requirement.name.lower().replace("_", "-"), requirement.specifier
        have = versions.get(name)
        if have is None:
            requirement.marker = None
            yield Problem(name, "be installed", f"{own} requires {wanted or 'it'}",
                          f"pip install '{requirement}'")  # fmt: skip
        elif not wanted.contains(have, prereleases=True):
            rule = f"be {wanted} for {own} {versions.get(own, '')}".rstrip()
            yield Problem(f"{name} {have}", rule, "", f"pip install '{name}{wanted}'")
    for name, tried in TRIED.items():
        have = versions.get(name)
        if have is not None and Version(have).release[:2] != Version(tried).release[:2]:
            yield note(
                f"{name} {have}: this package was tried with {tried}; others may behave otherwise",
                f"pip install {name}=={tried} where something is odd",
            )  # fmt: skip


SECONDS_TO_START = 60.0
STORE_BYTES = 80 * 1024**2  # the least that Ray accepts


def ray_rules() -> Iterator[Problem]:
    """Starts a small Ray cluster, unless this process has one, and runs a task in it."""
    import ray

    started = not ray.is_initialized()
    begin = time.monotonic()
    try:
        if started:
            ray.init(
                address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
                object_store_memory=STORE_BYTES, logging_level="ERROR",
            )  # fmt: skip
        answer = ray.get(ray.put("here"), timeout=SECONDS_TO_START)
        seconds = time.monotonic() - begin
        if answer == "here" and started:
            yield note(f"Ray {ray.__version__} starts in {seconds:.1f} s")
    except Exception as error:
        # Where its processes do not come up, Ray raises an Exception of no other class.
        of_ray = type(error) is Exception
        if not of_ray and not isinstance(error, OSError | RuntimeError | ValueError):
            raise
        yield Problem("Ray", "start", f"{type(error).__name__}: {error}",
                      "Stop old sessions (ray stop)")  # fmt: skip
    finally:
        if started:
            ray.shutdown()
