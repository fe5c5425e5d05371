"""The trunk of a language model on rows of text, in the densest form that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from rllib_llm.modules.packing.dense_packing import pack_dense
from rllib_llm.modules.packing.llama_trunk import fused_hidden, is_fusible
from rllib_llm.modules.packing.packed_attention import PACKED, AttentionLayout, Kernel
from rllib_llm.modules.packing.packing import Rows, WantedTokens, completion_rows, pack
from rllib_llm.modules.products import multiplies_by_onednn
from rllib_llm.shared.errors import SettingError

# Largest difference between our numbers and the model's own, as a share of the largest number: of
# 16 bits eight units in the last place, since each layer rounds both; a wrong layout differs more.
_TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2**-7, torch.bfloat16: 2**-4
}  # fmt: skip
# Layers whose attention is causal, perhaps within a window; of others the layout knows nothing.
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Trunk -> its attention when it was tried, and what came of it.
_verdicts: WeakKeyDictionary[nn.Module, tuple[str, bool]] = WeakKeyDictionary()


def wanted_tokens(trunk: nn.Module | None, rows: Rows) -> WantedTokens:
    """`rows` as `trunk` reads them: without padding and shared prompts once where its attention
    can be laid out, else padded to the longest (as for None)."""
    if trunk is None or not reads_dense(trunk) or not bool(rows.wanted.any()):
        return pack(rows)
    kernel = kernel_of(trunk)
    window = getattr(trunk.config.get_text_config(), "sliding_window", None)
    is_cut = window is not None and int(rows.attended.sum(dim=1).max()) > window
    if is_cut and kernel != "flash_attention_2":
        return pack(rows)
    embedding = next(trunk.get_input_embeddings().parameters())
    recurring = wants_recurring_sizes(embedding) or multiplies_by_onednn(trunk)
    return pack_dense(rows, recurring=recurring, kernel=kernel)


def use_kernel(model: nn.Module, kernel: Kernel) -> None:
    """Makes the trunks in `model` compute attention with `kernel` in passes over concatenated rows:
    log-probs, values, scores and gradients."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.packed_kernel = kernel


def kernel_of(trunk: nn.Module) -> Kernel:
    """The kernel chosen by `use_kernel`."""
    return getattr(trunk, "packed_kernel", "sdpa")


def wants_recurring_sizes(weight: Tensor) -> bool:
    """Whether each new number of tokens costs a model of such weights: oneDNN, which multiplies
    bfloat16 on processors, makes code for every size of a product, milliseconds and up to a
    megabyte each."""
    is_half = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return is_half and torch.backends.mkldnn.is_available()


def trunk_hidden(trunk: nn.Module, wanted: WantedTokens) -> Tensor:
    """Last hidden state [batch, length, hidden] of a Hugging Face trunk, for `wanted.pick`."""
    if wanted.layout is None:
        return padded_hidden(trunk, wanted.input_ids)
    # A mask of four dimensions is taken as it is; without one a square of all tokens is made.
    unused = torch.ones(1, 1, 1, 1, device=wanted.input_ids.device)
    return trunk(
        input_ids=wanted.input_ids,
        position_ids=wanted.position_ids,
        attention_mask=unused,
        use_cache=False,
        packed_layout=wanted.layout,
    ).last_hidden_state


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
    """Whether a trunk gives the same states for rows one behind another as for padded ones.

    Tried once per instance (and kind of attention), on models that compute attention through
    transformers' interface by torch's SDPA; a trunk that passes is left with `packed_attention` in
    its place, which without a layout is the same.

    Raises:
        SettingError: it does not, but a kernel was chosen for it that needs such rows.
    """
    if not isinstance(trunk, PreTrainedModel):
        return False
    known = _verdicts.get(trunk)
    if known is None or known[0] != trunk.config._attn_implementation:
        dense = _can_be_laid_out(trunk) and _same_states(trunk)
        known = _verdicts[trunk] = trunk.config._attn_implementation, dense
    if not known[1] and kernel_of(trunk) != "sdpa":
        raise SettingError(
            name="attn_implementation",
            value=kernel_of(trunk),
            rule=f"be 'sdpa' for {type(trunk).__name__}",
            reason="this model computes attention in a way of its own, or other numbers where rows "
            "lie one behind another, as other kernels read them",
            remedy="Leave it out",
        )
    return known[1]


def _can_be_laid_out(trunk: PreTrainedModel) -> bool:
    if not trunk._supports_attention_backend:
        return False
    if trunk.config._attn_implementation not in ("sdpa", PACKED):
        return False
    layer_types, _ = get_layer_types_and_kwargs(trunk.config.get_text_config())
    return _LAYER_TYPES.issuperset(layer_types)


def _same_states(trunk: PreTrainedModel) -> bool:
    before = trunk.config._attn_implementation
    device = next(trunk.parameters()).device
    prompts = torch.tensor([[0, 1], [0, 1], [1, 2]], device=device)
    completions = torch.tensor([[1, 2, 0], [2, 2, 1], [0, 1, 2]], device=device)
    everything = torch.ones_like(completions, dtype=torch.bool)
    lengths = torch.tensor([[3], [2], [1]], device=device)
    mask = torch.arange(3, device=device) < lengths
    rows = completion_rows(prompts, everything[:, :2], completions, mask)
    padded, dense = pack(rows), pack_dense(rows, kernel=kernel_of(trunk))
    with torch.no_grad(), eval_mode(trunk):
        expected = padded.pick(trunk_hidden(trunk, padded))
        trunk.set_attn_implementation(PACKED)
        same = same_numbers(dense.pick(trunk_hidden(trunk, dense)), expected)
    if not same:
        trunk.set_attn_implementation(before)
    return same


def same_numbers(ours: Tensor, own: Tensor) -> bool:
    """Whether two tensors agree up to the rounding of their dtype."""
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
