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

import logging
import os
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
from rllib_llm.modules.quantize import (
    calm_bitsandbytes,
    check_quantization,
    head_names,
    model_bytes,
    quantize,
    refuse_quantized,
    resolve_backend,
    verify_quantized,
)

__all__ = ["check_quantization", "load_quantized", "model_bytes", "quantize", "resolve_backend"]

logger = logging.getLogger(__name__)

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
        refuse_quantized(config, quantization, model)
        with torch.device("meta"):
            skeleton = _AUTO_CLASS[load].from_config(config)
        bnb_config = _bitsandbytes_config(quantization, dtype, head_names(skeleton))
        network = load(model, dtype=dtype, device=device, quantization_config=bnb_config)
        verify_quantized(network, quantization)
        calm_bitsandbytes()
    else:
        network = load(model, dtype=dtype, device=device)
        network = quantize(network, quantization, backend=backend, device=device)
    network.requires_grad_(False)
    logger.info(
        "%r holds %.1f MB (quantization=%s).", str(model), model_bytes(network) / 1e6, quantization
    )
    return network


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
