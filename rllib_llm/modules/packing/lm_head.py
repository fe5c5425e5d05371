"""Splits a causal language model into trunk and head, so that the head runs only where needed.

The head of most models is a linear layer; some scale or soft-cap its logits in their own forward.
Taking a model apart is therefore checked against the model itself, once per instance; a model that
cannot be taken apart is run whole.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rllib_llm.modules.packing.trunk import eval_mode, padded_hidden, same_numbers

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
_verdicts: WeakKeyDictionary[nn.Module, tuple[nn.Module | None, TrunkAndHead | None]] = (
    WeakKeyDictionary()
)


def take_apart(model: nn.Module) -> TrunkAndHead | None:
    """Trunk and head of an `AutoModelForCausalLM`, or None (and a warning) if they do not add up.

    They do when, in the model's own forward, the head is called once, on exactly what the trunk
    alone computes, and its logits go through a transform that the config declares: seen by handing
    the model logits from -100 to 100 in the head's place. Adapters that peft put into the layers
    are part of the trunk; those that prepend virtual tokens are refused with ValueError.
    """
    inner = _without_peft_shell(model)
    head = inner.get_output_embeddings()
    known = _verdicts.get(inner)
    if known is not None and known[0] is head:
        return known[1]
    halves = _matching_halves(inner, head)
    _verdicts[inner] = (head, halves)
    if halves is None:
        warnings.warn(
            f"{type(inner).__name__} is run whole for log-probs: its logits are not those of its "
            "trunk and output embedding. The numbers are the model's own, but logits are computed "
            "at every position, which costs time and memory.",
            stacklevel=3,
        )
    return halves


def _without_peft_shell(model: Any) -> PreTrainedModel:
    if not hasattr(model, "get_base_model"):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"model={type(model).__name__} must not prepend virtual tokens: log-probs are computed "
            "at the positions of real ones. Use LoRA or another adapter inside the layers."
        )
    return model.get_base_model()


def _matching_halves(model: PreTrainedModel, head: nn.Module | None) -> TrunkAndHead | None:
    if head is None:
        return None
    embedding = next(model.get_input_embeddings().parameters())
    input_ids = torch.arange(3, device=embedding.device).unsqueeze(0)
    with torch.no_grad(), eval_mode(model):
        seen = _run_with_probe(model, head, input_ids)
        if seen is None:
            return None
        transform = _matching_transform(seen, model.config)
        # Most models call their base_model, OPT its inner decoder; ModernBERT's is its head.
        for trunk in dict.fromkeys((model.base_model, model.get_decoder())):
            if transform is None or trunk is None or trunk is model or trunk is head:
                continue
            hidden = padded_hidden(trunk, input_ids)
            if hidden.dtype == seen.head_input.dtype and same_numbers(hidden, seen.head_input):
                return TrunkAndHead(trunk, head, transform)
    return None


@dataclass(frozen=True)
class _Seen:
    head_input: Tensor
    probe: Tensor  # handed on in the place of the head's logits
    logits: Tensor  # what the model made of it


def _run_with_probe(model: nn.Module, head: nn.Module, input_ids: Tensor) -> _Seen | None:
    """One forward of the model with a probe in the place of its head's logits."""
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
    return _Seen(calls[0][0], calls[0][1], logits)


def _matching_transform(seen: _Seen, config: Any) -> LogitTransform | None:
    for transform in _declared_transforms(config):
        if same_numbers(transform(seen.probe), seen.logits):
            return transform
    return None


def _declared_transforms(config: Any) -> Iterator[LogitTransform]:
    """The transforms that a model's config may mean."""
    text_config = config.get_text_config()

    def declared(name: str) -> float | None:
        number = getattr(text_config, name, None)
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
