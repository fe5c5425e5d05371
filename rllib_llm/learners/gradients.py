"""Gradients of learners that each hold all weights."""

from __future__ import annotations

from collections.abc import Callable

import torch


def sum_gradients_(
    params: list[torch.nn.Parameter], all_reduce: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Sums the gradients of `params` over all learners, in place and in one transfer.

    A parameter without a gradient counts as zero: this learner had no rows, or never uses it.
    """
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    flat = torch.cat([param.grad.reshape(-1) for param in params])
    all_reduce(flat)
    for param, grad in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad.copy_(grad.view_as(param))
