"""Loading of frozen models in fewer bits: judges, references, the trunk under adapters."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from rllib_llm.modules.model_source import DOTTED, model_config, source_kind
from rllib_llm.modules.precision import use_onednn
from rllib_llm.modules.pretrained import (
    load_sequence_classifier,
    resolve_dtype,
    without_weights,
)
from rllib_llm.modules.quantization import (
    calm_bitsandbytes,
    head_names,
    model_bytes,
    quantize,
    refuse_quantized,
    resolve_backend,
    verify_quantized,
)

logger = logging.getLogger(__name__)


def load_quantized(
    load: Callable[..., PreTrainedModel], model: str | os.PathLike, *,
    quantization: str = "none", backend: str = "auto", dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu", products: str = "mkl",
) -> PreTrainedModel:  # fmt: skip
    """Returns load(model) in the asked precision, frozen, in eval mode, on `device`.

    load: `load_causal_lm` or `load_sequence_classifier`.
    dtype: of what is not quantised and of the activations; "bf16" overrides it.
    products: the library that multiplies float32 on a CPU; see `precision.py`.

    bitsandbytes quantises while it reads a folder, so that the whole model is never in memory in
    full precision; but for nf4 on a CPU, where each layer's block size must be chosen.

    Raises:
        Problems: see `load`.
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
        refuse_quantized(model_config(value), quantization, model)
        heads = head_names(without_weights(value, classifier=load is load_sequence_classifier))
        if quantization == "int8":
            bnb_config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=heads)
        else:
            bnb_config = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=heads,
            )  # fmt: skip
        network = load(model, dtype=dtype, device=device, quantization_config=bnb_config)
        verify_quantized(network, quantization)
        calm_bitsandbytes()
    else:
        network = load(model, dtype=dtype, device=device)
        network = quantize(network, quantization, backend=backend, device=device)
    network.requires_grad_(False)
    if products == "onednn":
        use_onednn(network)
    megabytes = model_bytes(network) / 1e6
    logger.info("%r holds %.1f MB (quantization=%s).", str(model), megabytes, quantization)
    return network
