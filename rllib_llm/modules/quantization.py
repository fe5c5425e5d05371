"""Frozen models in fewer bits: bf16, int8 or nf4, through bitsandbytes or torchao.

What to choose (a 135 M parameter Llama on a CPU; KL and top-1 agreement of next-token
distributions and rank correlation of a reward model's scores, all against float32):

    quantization           MB    KL      top-1   rank corr.   time of prefill / decode
    none (float32)         538   0       1       1            1 / 1
    bf16                   269   0.001   0.97    0.998        7.3 / 0.7
    int8, torchao          220   0.004   0.95    0.998        1.2 / 1.1
    int8, bitsandbytes     220   0.023   0.92    0.989        2.0 / 4.2
    nf4, bitsandbytes      168   0.32    0.62    0.909        1.3 / 2.2

Hence the defaults: "none", since a small judge costs little and is exact; "int8" is the next thing
to try, and "auto" takes torchao's weight-only int8 on a CPU (closer and faster there) and
bitsandbytes' LLM.int8 on CUDA; "nf4" is for models that do not fit otherwise, on a GPU. Check with
`measure_drift`. Embeddings, norms and the head (lm_head or score head) stay as they are.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedModel,
)

from rllib_llm.modules.model_source import DOTTED, load_with_retries, source_kind
from rllib_llm.modules.pretrained import load_causal_lm, load_sequence_classifier, resolve_dtype
from rllib_llm.modules.quantized_layers import (
    bitsandbytes_layer,
    head_names,
    linear_for_conv1d,
    model_bytes,
    quantizable_layers,
    verify_quantized,
)

__all__ = ["check_quantization", "load_quantized", "model_bytes", "quantize", "resolve_backend"]

logger = logging.getLogger(__name__)

QUANTIZATIONS = ("none", "bf16", "int8", "nf4")
BACKENDS = ("auto", "bitsandbytes", "torchao")
_AUTO_CLASS = {
    load_causal_lm: AutoModelForCausalLM,
    load_sequence_classifier: AutoModelForSequenceClassification,
}


def load_quantized(
    load: Callable[..., PreTrainedModel],
    model: str | os.PathLike,
    *,
    quantization: str = "none",
    backend: str = "auto",
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
) -> PreTrainedModel:
    """Returns load(model) in the asked precision, frozen, in eval mode, on `device`.

    load: `load_causal_lm` or `load_sequence_classifier`.
    dtype: of what is not quantised and of the activations; "bf16" overrides it.

    bitsandbytes quantises while it reads a folder, so that the whole model is never in memory in
    full precision; but for nf4 on a CPU, where each layer's block size must be chosen.

    Raises:
        ModelSourceError: see `load`.
        ValueError: a combination that does not exist, or a model with nothing to quantise.
        ImportError: the backend is not installed.
    """
    chosen = resolve_backend(quantization, backend, device)
    if quantization == "bf16":
        dtype = torch.bfloat16
    dtype = resolve_dtype(dtype)
    kind, value = source_kind(model)
    nf4_on_cpu = quantization == "nf4" and torch.device(device).type == "cpu"
    if chosen == "bitsandbytes" and kind != DOTTED and not nf4_on_cpu:
        config = load_with_retries(lambda: AutoConfig.from_pretrained(value), value, kind)
        _refuse_quantized(config, quantization, model)
        with torch.device("meta"):
            skeleton = _AUTO_CLASS[load].from_config(config)
        bnb_config = _bitsandbytes_config(quantization, dtype, head_names(skeleton))
        network = load(model, dtype=dtype, device=device, quantization_config=bnb_config)
        verify_quantized(network, quantization)
        _calm_bitsandbytes()
    else:
        network = load(model, dtype=dtype, device=device)
        network = quantize(network, quantization, backend=backend, device=device)
    network.requires_grad_(False)
    logger.info(
        "%r holds %.1f MB (quantization=%s).", str(model), model_bytes(network) / 1e6, quantization
    )
    return network


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
    _refuse_quantized(model.config, quantization, type(model).__name__)
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
        _calm_bitsandbytes()
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


def _bitsandbytes_config(quantization: str, dtype: torch.dtype, heads: list[str]) -> Any:
    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=heads)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=heads,
    )


def _refuse_quantized(config: Any, quantization: str, model: object) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"quantization={quantization!r} must be 'none' for model={str(model)!r}: it was saved "
            "quantised already. Use 'none', or the unquantised model."
        )


def _calm_bitsandbytes() -> None:
    # It logs a warning for every layer of every forward pass where activations are not float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
