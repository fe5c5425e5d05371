"""What the processes of a stage hold in memory, by the sizes of models, without activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rllib_llm.modules.model_limits import TruncatedWeightsError, num_parameters
from rllib_llm.runs.doctor.finding import Finding
from rllib_llm.runs.doctor.machine import GIB, Machine
from rllib_llm.runs.doctor.stage import Stage

PROCESS_BYTES = int(0.5 * GIB)  # Python with torch, transformers and Ray
# Bytes of a parameter of a frozen model.
FROZEN_BYTES = {"none": 4.0, "bf16": 2.0, "int8": 1.1, "nf4": 0.6}
ADAM_BYTES = 8.0  # two moments in float32
TIGHT = 0.8  # of the memory


@dataclass(frozen=True)
class Share:
    """What one kind of process holds: `count` of them with `num_bytes` each."""

    process: str
    count: int
    num_bytes: float
    text: str


def memory_shares(stage: Stage) -> list[Share]:
    """What each kind of process of a stage holds; [] where a model's size is not known."""
    try:
        sizes = {name: num_parameters(folder) for name, folder in stage.models().items()}
    except TruncatedWeightsError:  # a finding of its own
        return []
    policy = sizes.get("model")
    if policy is None:
        return []
    learner = _learner(stage, policy)
    if not stage.is_rlhf:
        return [Share("learner", max(1, stage.num_learners), PROCESS_BYTES + learner, "training")]
    sampler = _sampler(stage, policy, sizes)
    if stage.num_samplers == 0:
        return [Share("process", 1, PROCESS_BYTES + learner + sampler, "training and sampling")]
    own = policy * _computing_bytes(stage.config)
    return [
        Share("learner", max(1, stage.num_learners), PROCESS_BYTES + learner, "training"),
        Share("sampler", stage.num_samplers, PROCESS_BYTES + own + sampler, "sampling"),
    ]


def memory_rules(stage: Stage, machine: Machine) -> Iterator[Finding]:
    """Findings about memory; shares on GPUs are compared with the smallest of them."""
    shares = memory_shares(stage)
    total = sum(share.count * share.num_bytes for share in shares)
    if not total or not machine.memory:
        return
    said = ", ".join(
        f"{share.count} {share.process}{'s' * (share.count > 1)} with {share.num_bytes / GIB:.1f} "
        "GiB" for share in shares
    )  # fmt: skip
    config = stage.config
    if config.num_gpus_per_learner and machine.gpu_memory:
        held, have, what = shares[0].num_bytes, min(machine.gpu_memory), "a GPU's memory"
    else:
        held, have, what = total, machine.memory, "the free memory"
    if held > TIGHT * have:
        yield Finding(
            "memory.total", "error" if held > have else "warning",
            f"{said}: {held / GIB:.1f} GiB before activations, and {what} has {have / GIB:.1f} GiB",
            "the system kills what does not fit",
            "Lower num_env_runners or sampling_batch_size, use lora, dtype bfloat16, a quantised "
            "reference, or a smaller model.",
        )  # fmt: skip


def _learner(stage: Stage, policy: int) -> float:
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
    if getattr(config, "critic", "none") == "separate":
        learner *= 2
    return learner


def _sampler(stage: Stage, policy: int, sizes: dict[str, int | None]) -> float:
    """KV cache and frozen models."""
    total = _cache_bytes(stage)
    for name in ("reward_model", "reference"):
        given = stage.env.get(name)
        settings = given if isinstance(given, dict) else {}
        size = sizes.get(name) or (policy if name == "reference" else 0)
        needs_reference = bool(stage.config.ref_kl_coeff) and stage.config.lora is None
        if name == "reference" and given is None and not needs_reference:
            continue
        if name == "reward_model" and given is None:
            continue
        default = "bf16" if stage.config.mixed_precision else "none"
        total += size * FROZEN_BYTES.get(str(settings.get("quantization", default)), 4.0)
    return total


def _cache_bytes(stage: Stage) -> float:
    from rllib_llm.modules.model_limits import text_config

    config = stage.config
    model: Any = text_config(config.pretrained_model)
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    size = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    rows = config.total_train_batch_size / max(1, stage.num_samplers)
    rows = min(rows, getattr(config, "sampling_batch_size", None) or rows)
    tokens = stage.env.get("max_prompt_len", 0) + config.max_new_tokens
    return float(
        rows * tokens * model.num_hidden_layers * 2 * heads * size * _computing_bytes(config)
    )


def _item_bytes(config: Any) -> int:
    return 2 if config.dtype == "bfloat16" else 4


def _computing_bytes(config: Any) -> int:
    return 2 if config.mixed_precision else _item_bytes(config)
