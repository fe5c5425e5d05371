"""Weights of a run's environments that follow from its results: the setting `env_weights`.

    def weights(metrics): return {"easy": 1, "hard": metrics.get("easy", {}).get("reward", 0)}

It is asked once for each update, after it, with the newest metrics of each environment by name
that was sampled yet, those reported as `env/<name>/<metric>`. Environments that it leaves out keep
the weight they had.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import require

Metrics = Mapping[str, Mapping[str, float]]


class Difficulty:
    """4 p (1 − p), at least `floor`, of the mean reward p of an environment, which is held within 0
    and 1: most for those that the policy solves half of the time, whose groups say most.

    Args:
        smoothing: of the mean, the share of its value before.
    """

    def __init__(self, floor: float = 0.1, smoothing: float = 0.8) -> None:
        self.floor, self.smoothing = floor, smoothing
        self.means: dict[str, float] = {}

    def __call__(self, metrics: Metrics) -> dict[str, float]:
        for name, of in metrics.items():
            mean = min(1.0, max(0.0, of["reward"]))
            self.means[name] = mean + self.smoothing * (self.means.get(name, mean) - mean)
        return {name: max(self.floor, 4 * p * (1 - p)) for name, p in self.means.items()}

    def get_state(self) -> dict[str, float]:
        """Its state for a checkpoint."""
        return dict(self.means)

    def set_state(self, state: dict[str, float]) -> None:
        """Restores `state`."""
        self.means = dict(state)


class EnvWeights:
    """The function that a run has chosen, and the weights so far.

    Args:
        chosen: "difficulty", or the dotted path of a function, or of a class that is called without
            arguments and makes one; its `get_state` and `set_state`, if any, serve checkpoints.
    """

    def __init__(self, chosen: str, names: Sequence[str], weights: Sequence[float]) -> None:
        found: Any = Difficulty
        if chosen != "difficulty":
            found = import_dotted(chosen, name="env_weights")
        self._function: Any = found() if inspect.isclass(found) else found
        self._weights = dict(zip(names, weights, strict=True))
        self._metrics: dict[str, dict[str, float]] = {}

    def after(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """The weights after an update with these metrics, `<name>/<metric>`.

        Raises:
            Problems: what the function returned are no weights of these environments.
        """
        by_name: dict[str, dict[str, float]] = {}
        for path, value in metrics.items():
            name, _, metric = path.partition("/")
            by_name.setdefault(name, {})[metric] = value
        self._metrics |= {name: of for name, of in by_name.items() if "episodes" in of}
        found = self._function(self._metrics)
        rule = f"return weights of {[*self._weights]}, numbers of at least 0"
        require(isinstance(found, Mapping) and found.keys() <= self._weights.keys()
                and all(0 <= weight < math.inf for weight in found.values()),
                "env_weights", found, rule)  # fmt: skip
        self._weights |= {name: float(weight) for name, weight in found.items()}
        require(any(self._weights.values()), "env_weights", found, "leave a weight above 0")
        return tuple(self._weights.values())

    def get_state(self) -> dict[str, Any]:
        """Its state for a checkpoint, with the function's."""
        own = self._function.get_state() if hasattr(self._function, "get_state") else None
        return {"weights": dict(self._weights), "metrics": self._metrics, "function": own}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores `state`, of those environments that there still are."""
        self._weights |= {n: w for n, w in state["weights"].items() if n in self._weights}
        self._metrics = {n: dict(of) for n, of in state["metrics"].items() if n in self._weights}
        if hasattr(self._function, "set_state") and state["function"] is not None:
            self._function.set_state(state["function"])
