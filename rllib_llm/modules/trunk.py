"""A causal language model as trunk and head: the trunk on rows of text in the densest form that it
reads, the head only where its logits are wanted.

Most heads are a linear layer; some models scale or soft-cap its logits in their own forward. Both
halves are tried once for each model, against the model itself: one whose attention cannot be laid
out reads padded rows, and one that cannot be taken apart is run whole.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from rllib_llm.modules.llama_trunk import fused_hidden, is_fusible
from rllib_llm.modules.model_source import text_config
from rllib_llm.modules.multimodal import text_decoder
from rllib_llm.modules.packed_attention import PACKED, AttentionLayout, Kernel
from rllib_llm.modules.packing import TokenRows, WantedTokens, completion_rows, pack, pack_dense
from rllib_llm.modules.precision import OneDNNLinear
from rllib_llm.modules.routers import fixed_experts
from rllib_llm.shared.errors import Problems

# Largest difference between our numbers and the model's own, as a share of the largest number: of
# 16 bits eight units in the last place, since each layer rounds both; a wrong layout differs more.
_TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2**-7, torch.bfloat16: 2**-4
}  # fmt: skip
# Layers whose attention is causal, perhaps within a window; of others the layout knows nothing.
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Trunk -> its attention when it was tried, and what came of it.
_verdicts: WeakKeyDictionary[nn.Module, tuple[str, bool]] = WeakKeyDictionary()


def wanted_tokens(model: nn.Module, rows: TokenRows, *, dense: bool = True) -> WantedTokens:
    """`rows` as a trunk reads them, on its device: without padding and shared prompts once where
    its attention can be laid out; else, and if not `dense`, padded to the longest."""
    device = next(model.parameters()).device
    if not dense or not reads_dense(model) or not bool(rows.wanted.any()):
        return pack(rows, device)
    kernel = kernel_of(model)
    window = getattr(text_config(model), "sliding_window", None)
    is_cut = window is not None and int(rows.attended.sum(dim=1).max()) > window
    if is_cut and kernel != "flash_attention_2":
        return pack(rows, device)
    recurring = wants_recurring_sizes(model)
    return pack_dense(rows, recurring=recurring, kernel=kernel, device=device)


def use_kernel(model: nn.Module, kernel: Kernel) -> None:
    """Makes the trunks in `model` compute attention with `kernel` in passes over concatenated rows:
    log-probs, values, scores and gradients."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.packed_kernel = kernel


def kernel_of(trunk: nn.Module) -> Kernel:
    """The kernel chosen by `use_kernel`."""
    return getattr(trunk, "packed_kernel", "sdpa")


def wants_recurring_sizes(model: nn.Module) -> bool:
    """Whether each new number of tokens costs the model time and memory: oneDNN, which multiplies
    bfloat16 on processors and float32 after `use_onednn`, makes code for every size of a product,
    milliseconds and up to 1.5 MB each, for the first thousand of which memory grows."""
    weight = next(model.parameters())
    if weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:
        return torch.backends.mkldnn.is_available()
    is_float32 = weight.dtype == torch.float32
    return is_float32 and any(isinstance(part, OneDNNLinear) for part in model.modules())


def trunk_hidden(trunk: nn.Module, wanted: WantedTokens) -> Tensor:
    """Last hidden state [batch, length, hidden] of a Hugging Face trunk, for `wanted.pick`."""
    if wanted.layout is None:
        return padded_hidden(trunk, wanted.input_ids)
    # A mask of four dimensions is taken as it is; without one a square of all tokens is made.
    unused = torch.ones(1, 1, 1, 1, device=wanted.input_ids.device)
    return trunk(
        input_ids=wanted.input_ids, position_ids=wanted.position_ids, attention_mask=unused,
        use_cache=False, packed_layout=wanted.layout,
    ).last_hidden_state  # fmt: skip


def wanted_hidden(trunk: nn.Module, wanted: WantedTokens) -> Tensor:
    """Last hidden state [tokens, hidden] at the positions that predict the wanted tokens and the
    surplus ones."""
    if isinstance(wanted.layout, AttentionLayout) and is_fusible(trunk):
        return fused_hidden(trunk, wanted)
    return wanted.pick(trunk_hidden(trunk, wanted))


def padded_hidden(trunk: nn.Module, input_ids: Tensor) -> Tensor:
    """Last hidden state [batch, length, hidden] of right-padded ids [batch, length].

    No attention mask is passed: attention is causal, so what follows a token cannot change it, and
    attention without a mask takes the faster kernels.
    """
    return trunk(input_ids=input_ids, use_cache=False).last_hidden_state


def reads_dense(trunk: nn.Module) -> bool:
    """Whether a trunk gives the same states for concatenated rows as for padded ones.

    Tried once per instance (and kind of attention), on models that compute attention through
    transformers' interface by torch's SDPA; a trunk that passes is left with `packed_attention` in
    its place, which without a layout is the same.

    Raises:
        Problems: it does not, but a kernel was chosen for it that needs such rows.
    """
    if not isinstance(trunk, PreTrainedModel):
        return False
    known = _verdicts.get(trunk)
    if known is None or known[0] != trunk.config._attn_implementation:
        dense = (
            trunk._supports_attention_backend
            and trunk.config._attn_implementation in ("sdpa", PACKED)
            and _LAYER_TYPES.issuperset(get_layer_types_and_kwargs(text_config(trunk))[0])
            and _same_states(trunk)
        )
        known = _verdicts[trunk] = trunk.config._attn_implementation, dense
    if not known[1] and kernel_of(trunk) != "sdpa":
        rule = f"be 'sdpa' for {type(trunk).__name__}"
        reason = "this model gives other numbers where rows are concatenated"
        raise Problems("attn_implementation", rule, reason, value=kernel_of(trunk))
    return known[1]


def _same_states(trunk: PreTrainedModel) -> bool:
    before = trunk.config._attn_implementation
    device = next(trunk.parameters()).device
    prompts = torch.tensor([[0, 1], [0, 1], [1, 2]])
    completions = torch.tensor([[1, 2, 0], [2, 2, 1], [0, 1, 2]])
    everything = torch.ones_like(completions, dtype=torch.bool)
    mask = torch.arange(3) < torch.tensor([[3], [2], [1]])
    rows = completion_rows(prompts, everything[:, :2], completions, mask)
    padded = pack(rows, device)
    dense = pack_dense(rows, kernel=kernel_of(trunk), device=device)
    with torch.no_grad(), eval_mode(trunk), fixed_experts(trunk):
        expected = padded.pick(trunk_hidden(trunk, padded))
        trunk.set_attn_implementation(PACKED)
        same = same_numbers(dense.pick(trunk_hidden(trunk, dense)), expected)
    if not same:
        trunk.set_attn_implementation(before)
    return same


def same_numbers(ours: Tensor, own: Tensor) -> bool:
    """Whether two tensors agree up to the rounding of their dtype."""
    if ours.shape != own.shape:
        return False
    scale = own.float().abs().max().clamp(min=1e-6)
    difference = (ours.float() - own.float()).abs().max()
    return bool(difference <= _TOLERANCE[ours.dtype] * scale)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Every part of `model` in eval mode; afterwards as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


# The check uses logits up to this size: a soft-cap does not show on small ones.
_PROBE_LOGIT = 100.0


@dataclass(frozen=True)
class LogitTransform:
    """A model's transformation of its linear head's logits: logits * multiplier / divisor,
    soft-cap.

    The soft-cap c is c tanh(logits / c) (Gemma 2); the scales are Cohere's and Granite's. Computed
    in the logits' own dtype, as the models do.
    """

    multiplier: float = 1.0
    divisor: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@dataclass(frozen=True)
class TrunkAndHead:
    """The two halves of a causal language model: logits(hidden(ids)) equals the model's output."""

    trunk: nn.Module
    head: nn.Module
    transform: LogitTransform

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of hidden states [..., hidden], in the head's dtype."""
        return self.transform(self.head(hidden))


# What the check of a model, with this head, found. A head put in later is checked again.
_halves_of: WeakKeyDictionary[nn.Module, tuple[nn.Module | None, TrunkAndHead | None]] = (
    WeakKeyDictionary()
)


def take_apart(model: nn.Module) -> TrunkAndHead | None:
    """Trunk and head of an `AutoModelForCausalLM`, or None (and a warning) if they do not add up.

    They do when, in the model's own forward, the head is called once, on exactly what the trunk
    alone computes, and its logits go through a transform that the config declares: seen by handing
    the model logits from -100 to 100 in the head's place. Adapters that peft put into the layers
    are part of the trunk; those that prepend virtual tokens are refused with ValueError.
    """
    inner: Any = model
    if hasattr(model, "get_base_model"):  # peft's shell
        if inner.active_peft_config.is_prompt_learning:
            raise ValueError(f"{type(model).__name__} must not prepend virtual tokens: use LoRA")
        inner = inner.get_base_model()
    head = inner.get_output_embeddings()
    known = _halves_of.get(inner)
    if known is not None and known[0] is head:
        return known[1]
    halves = _matching_halves(inner, head)
    _halves_of[inner] = (head, halves)
    if halves is None:
        slow = f"{type(inner).__name__} is run whole for log-probs, which costs time and memory"
        why = "its logits are not those of its trunk and output embedding"
        warnings.warn(f"{slow}: {why}.", stacklevel=3)
    return halves


def _matching_halves(model: PreTrainedModel, head: nn.Module | None) -> TrunkAndHead | None:
    if head is None:
        return None
    embedding = next(model.get_input_embeddings().parameters())
    input_ids = torch.arange(3, device=embedding.device).unsqueeze(0)
    with torch.no_grad(), eval_mode(model):
        seen = _run_with_probe(model, head, input_ids)
        if seen is None:
            return None
        head_input, probe, logits = seen
        transforms = _declared_transforms(model.config)
        transform = next((t for t in transforms if same_numbers(t(probe), logits)), None)
        # Most models call their base_model, OPT its inner decoder; ModernBERT's is its head. The
        # decoder of a multimodal model may be a whole causal LM.
        text = text_decoder(model)
        of_text = (text.base_model, getattr(text, "model", None)) if text is not model else ()
        for trunk in dict.fromkeys((*of_text, model.base_model, model.get_decoder())):
            if transform is None or trunk is None or any(part is head for part in trunk.modules()):
                continue
            hidden = padded_hidden(trunk, input_ids)
            if hidden.dtype == head_input.dtype and same_numbers(hidden, head_input):
                return TrunkAndHead(trunk, head, transform)
    return None


def _run_with_probe(
    model: nn.Module, head: nn.Module, input_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The head's input in one forward of the model, the probe handed on in the place of the head's
    logits, and the logits that the model made of it; None where the head is not called once."""
    calls: list[tuple[Tensor, Tensor]] = []
    this_thread = threading.get_ident()

    def swap(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if threading.get_ident() != this_thread:
            return output
        steps = torch.linspace(-_PROBE_LOGIT, _PROBE_LOGIT, output.numel(), device=output.device)
        calls.append((args[0], steps.to(output.dtype).view_as(output)))
        return calls[-1][1]

    handle = head.register_forward_hook(swap)
    try:
        logits = model(input_ids=input_ids, use_cache=False).logits
    finally:
        handle.remove()
    if len(calls) != 1 or calls[0][1].shape != logits.shape:
        return None
    return *calls[0], logits


def _declared_transforms(config: Any) -> Iterator[LogitTransform]:
    """The transforms that a model's config may mean."""

    def declared(name: str) -> float | None:
        number = getattr(text_config(config), name, None)
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return None
        return float(number)

    for softcap in dict.fromkeys((None, declared("final_logit_softcapping"))):
        yield LogitTransform(softcap=softcap)
        for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
            number = declared(name)
            if number:
                yield LogitTransform(multiplier=number, softcap=softcap)
                yield LogitTransform(divisor=number, softcap=softcap)
