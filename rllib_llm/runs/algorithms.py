"""Algorithms by the name a user writes: ours, RLlib's, or a dotted path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllib_llm.shared.errors import UserError

if TYPE_CHECKING:
    from ray.tune import Trainable


def algorithm_class(name: str, where: str) -> type[Trainable]:
    """Return the algorithm called `name`: a registered name or a dotted path to a class.

    It is an Algorithm of RLlib, or another Trainable of Tune with a `get_default_config()`.

    Raises:
        UserError: nothing of that name; the message has the nearest ones.
    """
    from ray.tune import Trainable

    from rllib_llm.algorithms.registry import get_algorithm_class

    found = get_algorithm_class(name)
    is_trainable = isinstance(found, type) and issubclass(found, Trainable)
    if not (is_trainable and hasattr(found, "get_default_config")):
        raise UserError(
            name=f"{where}.run",
            value=name,
            rule="be an RLlib Algorithm or another Tune Trainable",
            reason=f"it is {found!r}",
            remedy="Check the path",
        )
    return found
