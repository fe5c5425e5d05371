"""Mixed precision: float32 weights are trained, and a bfloat16 copy of them computes.

    weights (float32, the optimiser's) ── cast once per step ──▶ copy (bfloat16)
        .grad (float32) ◀── added up after every backward pass ── its gradient (bfloat16)

As Micikevicius et al. 2018, "Mixed Precision Training", section 3.1, without the scaled losses that
float16 needs. Norms and softmax inside the layers are computed in float32, as transformers' are.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection

import torch
from torch import nn

from rllib_llm.shared.process import multiplies_bfloat16


def computing_dtype(mixed_precision: str | None) -> torch.dtype | None:
    """The dtype of the copy that computes; None: the weights compute themselves."""
    assert mixed_precision in (None, "bf16"), "an algorithm decides what 'auto' is"
    return None if mixed_precision is None else torch.bfloat16


def cuda_multiplies_bfloat16() -> bool:
    """Whether there is a CUDA device here, and it has products of bfloat16."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def warn_of_emulation(
    dtype: torch.dtype | None,
    device: torch.device | str,
    multiplies: Callable[[], bool] = multiplies_bfloat16,
) -> None:
    """Warns if the processor emulates products of `dtype`; see `multiplies`."""
    if dtype is None or torch.device(device).type != "cpu" or multiplies():
        return
    warnings.warn(
        "mixed_precision='bf16' is several times slower than float32 here: this processor has "
        "neither AMX nor AVX512-BF16 and emulates products of bfloat16. The run goes on in it, "
        "so that its numbers stay comparable; leave mixed_precision out in a new one.",
        stacklevel=2,
    )


def cast_parameters_(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the float32 parameters of `model`, in place; quantised ones and buffers (the
    frequencies of rotary embeddings) stay as they are."""
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)


class ComputingCopy:
    """`model` with the weights of another one, `weights`, in another dtype.

    The gradient of each of its parameters is added to that of the weight it was cast from. Frozen
    weights need not be exact to be trained: they are cast themselves, and shared.

    Args:
        weights: a model whose float32 parameters are trained.
        dtype: what the copy computes in.
        keep: parts of `weights` that compute as they are, and are shared with the copy.
    """

    def __init__(
        self, weights: nn.Module, dtype: torch.dtype, keep: Collection[nn.Module] = ()
    ) -> None:
        kept = {id(parameter) for part in keep for parameter in part.parameters()}
        memo: dict[int, object] = {id(part): part for part in keep}
        self._twins: dict[int, nn.Parameter] = {}
        self._trained: list[nn.Parameter] = []
        for parameter in weights.parameters():
            memo[id(parameter)] = parameter
            if parameter.dtype != torch.float32 or id(parameter) in kept:
                continue
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
                continue
            twin = nn.Parameter(parameter.detach().to(dtype))
            twin.register_post_accumulate_grad_hook(_adds_to(parameter))
            memo[id(parameter)] = self._twins[id(parameter)] = twin
            self._trained.append(parameter)
        self.model: nn.Module = copy.deepcopy(weights, memo)

    def twin(self, weight: torch.Tensor) -> torch.Tensor:
        """The computing copy of a weight; the weight itself if it is shared."""
        return self._twins.get(id(weight), weight)

    @torch.no_grad()
    def cast(self) -> None:
        """Copies the current weights."""
        twins = [self._twins[id(weight)] for weight in self._trained]
        torch._foreach_copy_(twins, self._trained)


def _adds_to(weight: nn.Parameter) -> Callable[[torch.Tensor], None]:
    def add(twin: torch.Tensor) -> None:
        assert twin.grad is not None
        if weight.grad is None:  # as the weight lies, whichever way the gradient was computed
            weight.grad = torch.empty_like(weight).copy_(twin.grad)
        else:
            weight.grad.add_(twin.grad)
        twin.grad = None

    return add
