"""What is done where a GPU's memory does not suffice: the same work again, in smaller parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def until_it_fits(run: Callable[[], Result], make_smaller: Callable[[], str | None]) -> Result:
    """What `run()` gives, called again wherever a GPU's memory does not suffice.

    Args:
        run: does its work from the beginning.
        make_smaller: has `run` take smaller parts, and says so; None: there are none.

    Raises:
        torch.OutOfMemoryError: the smallest part is too much.
    """
    while True:
        try:
            return run()
        except torch.OutOfMemoryError:
            said = make_smaller()
            if said is None:
                raise
        # Out of the handler, since what was raised holds on to the tensors.
        warnings.warn(said, stacklevel=3)
        torch.cuda.empty_cache()
