"""Low-rank adapters on a frozen trunk (Hu et al. 2022), QLoRA where the trunk is quantised.

peft puts them into the model's own layers, so that a policy with adapters is still an ordinary
causal language model: sampling and scoring need to know nothing. Only adapters are trained,
published and kept in checkpoints; every process loads the trunk itself. The trunk with its adapters
off is the model that training started from, which makes a second copy for the KL superfluous.

`adapter_folder.py` puts them on disk.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

ADAPTER = "default"  # peft's own name for the only adapter of a model
DEFAULTS = {"r": 16, "alpha": 32, "dropout": 0.0, "target_modules": "all-linear"}
# Further fields of peft's LoraConfig that change which layers get what, and leave W + s B A.
PASSED_ON = (
    "alpha_pattern",
    "exclude_modules",
    "layers_pattern",
    "layers_to_transform",
    "rank_pattern",
    "use_rslora",
)

# What peft and others call them.
OTHER_NAMES = {"rank": "r", "lora_r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout"}


def check_lora(lora: Any) -> None:
    """Raises ValueError for settings of adapters that are none; see `add_adapters`."""
    if not isinstance(lora, dict):
        raise ValueError(
            f"lora={lora!r} must be a dict such as {DEFAULTS} or None: it describes the adapters. "
            "Use {} for the defaults, None to train all weights."
        )
    allowed = [*DEFAULTS, *PASSED_ON]
    for key in lora:
        if key not in allowed:
            called = {**{name: name for name in allowed}, **OTHER_NAMES}
            close = difflib.get_close_matches(str(key), called, n=1)
            hint = f"Did you mean {called[close[0]]!r}?" if close else "Leave it out."
            raise ValueError(
                f"lora={lora!r} must hold only {allowed}: {key!r} is none of them. {hint}"
            )
    settings = {**DEFAULTS, **lora}
    rules = {
        "r": (settings["r"] in range(1, 2**16), "a whole number of at least 1"),
        "alpha": (_is_number(settings["alpha"]) and settings["alpha"] > 0, "above 0"),
        "dropout": (_is_number(settings["dropout"]) and 0 <= settings["dropout"] < 1, "in [0, 1)"),
        "target_modules": (bool(settings["target_modules"]), "'all-linear' or a list of names"),
    }
    for key, (holds, rule) in rules.items():
        if not holds:
            raise ValueError(
                f"lora.{key}={settings[key]!r} must be {rule}: adapters add alpha/r * B A to a "
                f"weight. Leave it out for {DEFAULTS[key]!r}."
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def add_adapters(model: nn.Module, lora: dict[str, Any], *, seed: int = 0) -> None:
    """Freezes `model`, a causal language model, and puts trainable adapters into its layers.

    lora: `r` (rank), `alpha` (the adapters' share is scaled by alpha/r), `dropout` of their input
        (0 in reinforcement learning: with dropout the policy being trained is not the one that
        sampled), `target_modules` ("all-linear": every linear layer but the head; or names), and
        what `PASSED_ON` lists. B starts at 0: the model is unchanged at first.
    seed: of A; every process must draw the same.

    Adapters are float32 whatever the model's dtype.

    Raises:
        ValueError: a setting that is none, or target_modules that the model does not have.
    """
    from peft import inject_adapter_in_model

    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(peft_config(lora), model, adapter_name=ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.eval()


def peft_config(lora: dict[str, Any]) -> Any:
    """peft's LoraConfig for our settings."""
    from peft import LoraConfig

    check_lora(lora)
    settings = {**DEFAULTS, **lora}
    targets = settings["target_modules"]
    return LoraConfig(
        r=settings["r"],
        lora_alpha=settings["alpha"],
        lora_dropout=settings["dropout"],
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
        **{name: settings[name] for name in PASSED_ON if name in settings},
    )


def has_adapters(model: nn.Module) -> bool:
    """Whether `add_adapters` was called on it, or an adapter loaded into it."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is part of an adapter."""
    return ".lora_" in name


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model computes what its trunk alone does while the context is open.

    peft's own switch also changes `requires_grad`, of which a graph that is being built, or shards,
    would take notice; here nothing but the forward changes.
    """
    layers = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, off in zip(layers, before, strict=True):
            layer._disable_adapters = off


@torch.no_grad()
def merge_into(plain: nn.Module, adapted: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Makes `plain` compute what `adapted` does: each adapted weight becomes W + s B A, in place.

    plain: the same architecture without adapters, its weights those of the unquantised trunk.
    adapted: gives the scale s and, where its trunk is quantised, the weights W, dequantised.
    tensors: the adapters by their names in `adapted`.
    """
    targets = dict(plain.named_modules())
    for name, layer in adapted.named_modules():
        target = targets.get(name.removesuffix(".base_layer"))
        if target is None or not _is_quantized(layer):
            continue
        weight = _dense_weight(layer)
        target.weight.copy_(weight.T if isinstance(target, Conv1D) else weight)
    for name, layer in adapted.named_modules():
        pair = [f"{name}.lora_{half}.{ADAPTER}.weight" for half in "AB"]
        if any(half not in tensors for half in pair):
            continue
        target = targets[name.replace(".base_layer", "")]  # one inside another: see _parameter_name
        weight = getattr(target, _parameter_name(layer))
        a, b = (tensors[half].to(weight.device, torch.float32) for half in pair)
        delta = layer.scaling[ADAPTER] * _product(a, b, weight)
        weight.copy_(weight.float() + (delta.T if isinstance(target, Conv1D) else delta))


def _parameter_name(layer: nn.Module) -> str:
    """Which parameter of its base an adapter belongs to. Experts are several weights of one module,
    around which peft puts a wrapper for each: `experts` is one, `experts.base_layer` the next."""
    return getattr(layer, "parameter_name", "weight")


def _product(a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """B A [out, in], or [experts, out, in] for the weights of all experts of a layer.

    Of several experts peft keeps the A one below another, and the columns of their B in turns.
    """
    if weight.ndim == 2:
        return b @ a
    experts = len(weight)
    return b.reshape(len(b), -1, experts).permute(2, 0, 1) @ a.reshape(experts, -1, a.shape[-1])


def _is_quantized(layer: nn.Module) -> bool:
    weight = getattr(layer, "weight", None)
    if weight is None or isinstance(weight, DTensor):  # sharded weights are plain ones in pieces
        return False
    return type(weight.data) is not torch.Tensor or _is_bitsandbytes(weight)


def _is_bitsandbytes(weight: Any) -> bool:
    return type(weight).__module__.startswith("bitsandbytes")


def _dense_weight(layer: nn.Module) -> torch.Tensor:
    """The weight [out, in] of a quantised linear layer as floats."""
    if _is_bitsandbytes(layer.weight):
        from peft.utils.integrations import dequantize_bnb_weight

        return dequantize_bnb_weight(layer.weight, state=getattr(layer, "state", None))
    return layer.weight.dequantize()
