"""Algorithms by the name a user writes: ours, RLlib's, or a dotted path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllib_llm.cli.errors import UserError

if TYPE_CHECKING:
    from ray.rllib.algorithms import Algorithm


def algorithm_class(name: str, where: str) -> type[Algorithm]:
    """Return the algorithm called `name`: a registered name or a dotted path to a class.

    Raises:
        UserError: nothing of that name; the message has the nearest ones.
    """
    from ray.rllib.algorithms import Algorithm

    from rllib_llm.algorithms.registry import get_algorithm_class

    found = get_algorithm_class(name)
    if not isinstance(found, type) or not issubclass(found, Algorithm):
        raise UserError(
            f"{where}.run={name!r} must be a subclass of ray.rllib.algorithms.Algorithm: "
            f"it is {found!r}. Check the path."
        )
    return found
