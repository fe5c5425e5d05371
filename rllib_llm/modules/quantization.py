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
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rllib_llm.modules.precision import keep_unpacked
from rllib_llm.shared.errors import Problem, SettingWarning, report, require, warning

if TYPE_CHECKING:  # it imports what models are made of, and settings are checked without
    from transformers import PreTrainedModel

_NF4_BLOCKS = (64, 32)  # values that share a scale: bitsandbytes' default, and its smallest


def head_names(model: PreTrainedModel) -> list[str]:
    """Names of the modules that stay unquantised: the LM head, or a classifier's whole head, and
    what a multimodal model has beside its text decoder."""
    from rllib_llm.modules.multimodal import heads, other_parts  # imports what models are made of

    own = {id(head) for head in heads(model)}
    names = [name for name, module in model.named_modules() if id(module) in own]
    return names + other_parts(model)


def quantizable_layers(model: nn.Module, heads: list[str]) -> Iterator[tuple[str, nn.Linear]]:
    """(name, layer) of every linear layer outside `heads`, quantised already or not."""
    for name, module in model.named_modules():
        in_head = any(name == head or name.startswith(head + ".") for head in heads)
        if isinstance(module, nn.Linear) and not in_head:
            yield name, module


def is_quantized(layer: nn.Linear) -> bool:
    """True where the weight of `layer` is stored in eight bits or fewer."""
    weight: Tensor = layer.weight
    while hasattr(weight, "__tensor_flatten__"):  # torchao: a tensor of tensors, values first
        weight = getattr(weight, weight.__tensor_flatten__()[0][0])
    return weight.element_size() == 1


def verify_quantized(model: PreTrainedModel, quantization: str) -> None:
    """Checks that the quantisation asked for took effect; warns where it did in part.

    Raises:
        ValueError: no layer of `model` was quantised.
    """
    layers = list(quantizable_layers(model, head_names(model)))
    left = [name for name, layer in layers if not is_quantized(layer)]
    require(
        len(left) != len(layers), "quantization", quantization,
        f"be 'none' or 'bf16' for {type(model).__name__}",
        f"none of its {len(layers)} linear layers outside the head can be quantised",
    )  # fmt: skip
    if left:
        which = f"{len(left)} of {len(layers)} linear layers of {type(model).__name__}"
        warnings.warn(f"{which} stay unquantised, the first is {left[0]!r}.", stacklevel=2)


def model_bytes(model: nn.Module) -> int:
    """Returns the bytes of all parameters and buffers, including scales of quantised weights."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({id(tensor): _tensor_bytes(tensor) for tensor in tensors}.values())


def _tensor_bytes(tensor: Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_tensor_bytes(getattr(tensor, n)) for n in tensor.__tensor_flatten__()[0])
    size = tensor.numel() * tensor.element_size()
    scales = [getattr(tensor, "SCB", None)]  # bitsandbytes: row scales of int8 ...
    state = getattr(tensor, "quant_state", None)  # ... and block scales of nf4, quantised too
    while state is not None:
        scales += [state.absmax, state.code]
        state = state.state2
    return size + sum(s.numel() * s.element_size() for s in scales if s is not None)


def bitsandbytes_layer(
    layer: nn.Linear, quantization: str, device: str | torch.device
) -> nn.Linear:
    """`layer` quantised by bitsandbytes on `device`; `layer` itself where it cannot be.

    bitsandbytes (0.50) quantises nf4 weights in blocks over the flattened matrix, but on a CPU
    reads them back with blocks that begin anew in each row: rows must be whole blocks there, or
    the weights come out wrong without an error (a quarter off instead of a tenth).
    """
    from bitsandbytes import nn as bnb

    on_cpu = torch.device(device).type == "cpu"
    block = next((b for b in _NF4_BLOCKS if layer.in_features % b == 0 or not on_cpu), None)
    if quantization == "nf4" and block is None:
        return layer
    sizes = (layer.in_features, layer.out_features, layer.bias is not None)
    weight = layer.weight.data
    if quantization == "int8":
        made: nn.Linear = bnb.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
        made.weight = bnb.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        made = bnb.Linear4bit(*sizes, compute_dtype=weight.dtype, quant_type="nf4")
        made.weight = bnb.Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=True,
            blocksize=block,
        )  # fmt: skip
    made.bias = layer.bias
    keep_unpacked(made)
    return made.to(device).eval()


def linear_for_conv1d(model: nn.Module) -> None:
    """Replaces GPT-2's Conv1D layers, linear layers stored transposed, by nn.Linear."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            in_features, out_features = module.weight.shape
            linear = nn.Linear(in_features, out_features, device="meta")
            linear.weight = nn.Parameter(module.weight.data.T.contiguous())
            linear.bias = module.bias
            model.set_submodule(name, linear.eval())


QUANTIZATIONS = ("none", "bf16", "int8", "nf4")
BACKENDS = ("auto", "bitsandbytes", "torchao")


def quantize(
    model: Any, quantization: str, *, backend: str = "auto", device: str | torch.device = "cpu"
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
        weights_only = Int8WeightOnlyConfig(set_inductor_config=False)
        quantize_(model.to(device), weights_only, filter_fn=lambda _, name: name in inside)
    else:
        for name, layer in list(quantizable_layers(model, heads)):
            model.set_submodule(name, bitsandbytes_layer(layer, quantization, device))
        model = model.to(device)
        calm_bitsandbytes()
    verify_quantized(model, quantization)
    return model


def check_quantization(quantization: str, backend: str) -> None:
    """Raises ValueError for an unknown name, or nf4 through torchao."""
    backends = BACKENDS if quantization != "nf4" else ("auto", "bitsandbytes")
    given = ("quantization", quantization, QUANTIZATIONS), ("backend", backend, backends)
    wrong = [
        Problem(name, f"be one of {', '.join(allowed)}", value=value)
        for name, value, allowed in given if value not in allowed
    ]  # fmt: skip
    report(wrong)


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
            effect = f"has no effect with quantization={quantization!r}: torch does it alone"
            problem = warning("backend", "", effect, "Remove it", backend)
            warnings.warn(SettingWarning(problem), stacklevel=2)
        return "none"
    if backend == "auto":
        on_cpu = torch.device(device).type == "cpu"
        backend = "torchao" if quantization == "int8" and on_cpu else "bitsandbytes"
    if importlib.util.find_spec(backend) is None:
        where = f"quantization={quantization!r} on {device!s}"
        raise ImportError(f"{where} needs {backend}: run pip install {backend}, or choose 'bf16'")
    return backend


def refuse_quantized(config: Any, quantization: str, model: object) -> None:
    """Raises ValueError if the `config` of `model` declares quantised weights."""
    require(getattr(config, "quantization_config", None) is None, "quantization", quantization,
            f"be 'none' for model={str(model)!r}", "it was saved quantised already")  # fmt: skip


def calm_bitsandbytes() -> None:
    """Silences a warning for each layer and forward pass with activations other than float16."""
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


@torch.no_grad()
def next_token_drift(
    model: PreTrainedModel, exact_model: PreTrainedModel, ids: Tensor, mask: Tensor
) -> dict[str, float]:
    """Drift of the next-token distributions of a causal LM on right-padded texts.

    ids [N, L] int64, mask [N, L] bool; means over all tokens with mask True.

    Returns:
        kl: KL(exact || model) [nats]; top1: share of tokens at which both rank the same token
        first.
    """
    attention_mask = mask.long()
    logprobs, exact_logprobs = (
        m(input_ids=ids.to(m.device), attention_mask=attention_mask.to(m.device), use_cache=False)
        .logits.to(ids.device)[mask].float().log_softmax(-1)
        for m in (model, exact_model)
    )  # fmt: skip
    kl = (exact_logprobs.exp() * (exact_logprobs - logprobs)).sum(-1)
    same = logprobs.argmax(-1) == exact_logprobs.argmax(-1)
    return {"kl": kl.mean().item(), "top1": same.float().mean().item()}


def score_drift(scores: Tensor, exact_scores: Tensor) -> dict[str, float]:
    """Drift of a reward model's scores [N] from the exact ones [N].

    Returns:
        rank_corr: Spearman's rank correlation (ties share their mean rank; NaN where all scores of
        one side are equal); max_abs: largest difference of two scores of one text.
    """
    from scipy.stats import rankdata  # takes a second to import

    ranks = [torch.from_numpy(rankdata(each.cpu().numpy())) for each in (scores, exact_scores)]
    return {
        "rank_corr": torch.corrcoef(torch.stack(ranks))[0, 1].item(),
        "max_abs": (scores - exact_scores).abs().max().item(),
    }
