"""A model that is in memory, in fewer bits; `quantization.py` says what to choose."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from typing import Any

import torch
from transformers import PreTrainedModel

from rllib_llm.modules.quantized_layers import (
    bitsandbytes_layer,
    head_names,
    linear_for_conv1d,
    quantizable_layers,
    verify_quantized,
)

QUANTIZATIONS = ("none", "bf16", "int8", "nf4")
BACKENDS = ("auto", "bitsandbytes", "torchao")


def quantize(
    model: Any,
    quantization: str,
    *,
    backend: str = "auto",
    device: str | torch.device = "cpu",
) -> PreTrainedModel:
    """Returns `model` (a PreTrainedModel) with its linear layers quantised in place, on `device`.

    Raises:
        ValueError: a combination that does not exist, or a model with nothing to quantise.
        ImportError: the backend is not installed.
    """
    chosen = resolve_backend(quantization, backend, device)
    if quantization == "none":
        return model.to(device)
    if quantization == "bf16":
        return model.to(device=device, dtype=torch.bfloat16)
    refuse_quantized(model.config, quantization, type(model).__name__)
    heads = head_names(model)
    linear_for_conv1d(model)
    if chosen == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        inside = {name for name, _ in quantizable_layers(model, heads)}
        quantize_(
            model.to(device),
            Int8WeightOnlyConfig(set_inductor_config=False),
            filter_fn=lambda _, name: name in inside,
        )
    else:
        for name, layer in list(quantizable_layers(model, heads)):
            model.set_submodule(name, bitsandbytes_layer(layer, quantization, device))
        model = model.to(device)
        calm_bitsandbytes()
    verify_quantized(model, quantization)
    return model


def check_quantization(quantization: str, backend: str) -> None:
    """Raises ValueError for an unknown name, or nf4 through torchao."""
    for name, given, allowed in (
        ("quantization", quantization, QUANTIZATIONS),
        ("backend", backend, BACKENDS),
    ):
        if given not in allowed:
            raise ValueError(
                f"{name}={given!r} must be one of {', '.join(allowed)}: nothing else is built in. "
                f"{allowed[0]!r} is the default."
            )
    if (quantization, backend) == ("nf4", "torchao"):
        raise ValueError(
            "backend='torchao' must be 'bitsandbytes' or 'auto' with quantization='nf4': torchao "
            "is used for int8 only. Change one of the two."
        )


def resolve_backend(quantization: str, backend: str, device: str | torch.device) -> str:
    """Returns the library that quantises: "none", "bitsandbytes" or "torchao".

    "auto": torchao for int8 on a CPU, bitsandbytes for everything else.

    Raises:
        ValueError: an unknown name, or nf4 through torchao.
        ImportError: the library is not installed.
    """
    check_quantization(quantization, backend)
    if quantization in ("none", "bf16"):
        if backend != "auto":
            warnings.warn(
                f"backend={backend!r} has no effect with quantization={quantization!r}: torch does "
                "it alone. Remove it, or choose int8 or nf4.",
                stacklevel=2,
            )
        return "none"
    if backend == "auto":
        on_cpu = torch.device(device).type == "cpu"
        backend = "torchao" if quantization == "int8" and on_cpu else "bitsandbytes"
    if importlib.util.find_spec(backend) is None:
        raise ImportError(
            f"quantization={quantization!r} on {device!s} needs {backend}, which is not installed. "
            f"Run pip install {backend}, or choose quantization 'bf16' or 'none'."
        )
    return backend


def refuse_quantized(config: Any, quantization: str, model: object) -> None:
    """Raises ValueError where the `config` of `model` says that its weights are quantised."""
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"quantization={quantization!r} must be 'none' for model={str(model)!r}: it was saved "
            "quantised already. Use 'none', or the unquantised model."
        )


def calm_bitsandbytes() -> None:
    """Silences a warning for each layer and forward pass with activations other than float16."""
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
