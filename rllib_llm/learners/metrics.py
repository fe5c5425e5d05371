"""Metrics of an update: means over its mini-batches, its settings, refusals."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import TypeVar

import torch

from rllib_llm.shared.errors import require

REPORT = "report"  # of an update's results, beside the metrics: see `LanguageModelLearner.report`
MESSAGES, MEANS, NUM_PARAMETERS = "messages", "means", "num_parameters"  # of a report

# --- means --------------------------------------------------------------------------------------


class WeightedMeans:
    """Running means by name, weighted by counts.

    `add(name, total, count)`: `total` is a sum over this learner's share, `count` the number of
    items in all learners' shares, so that the learners' means add up to the global mean.
    """

    def __init__(self) -> None:
        self._totals: dict[str, list[torch.Tensor | float]] = {}  # to be added up by `pop`
        self._counts: dict[str, list[torch.Tensor | float]] = {}

    def add(self, name: str, total: torch.Tensor | float, count: torch.Tensor | float) -> None:
        """Tensors are kept, not to be written to: nothing waits for the device before `pop`."""
        self.add_total(name, total)
        self.add_count(name, count)

    def add_count(self, name: str, count: torch.Tensor | float) -> None:
        """Counts `count` more items of `name`, whose totals are added by other calls."""
        self._counts.setdefault(name, []).append(count)

    def add_total(self, name: str, total: torch.Tensor | float) -> None:
        """Adds to the total of `name`, whose items are counted by other calls.

        Raises:
            Problems: it is not one number.
        """
        if isinstance(total, torch.Tensor):
            shape = tuple(total.shape)
            require(total.numel() == 1, f"metric {name!r} of shape", shape, "be one number", "",
                    "Pass its sum()")  # fmt: skip
            total = total.detach()
        self._totals.setdefault(name, []).append(total)

    def copy(self) -> WeightedMeans:
        """One with the same means, for `take`."""
        copied = WeightedMeans()
        copied.take(self)
        return copied

    def take(self, other: WeightedMeans) -> None:
        """Replaces the means by those of another."""
        self._totals = {name: list(parts) for name, parts in other._totals.items()}
        self._counts = {name: list(parts) for name, parts in other._counts.items()}

    def pop(self, uncounted: str = "") -> dict[str, float]:
        """All means, then forgets them; a name with nothing counted, or no total, is left out.

        uncounted: a name whose count is also that of totals that were not counted.
        """
        lists = [*self._totals.values(), *self._counts.values()]
        # Those on a GPU are fetched all at once.
        remote = [p for parts in lists for p in parts if isinstance(p, torch.Tensor) and p.is_cuda]
        numbers = torch.stack([part.double() for part in remote]).tolist() if remote else []
        known = {id(part): number for part, number in zip(remote, numbers, strict=True)}

        def sum_of(parts: list[torch.Tensor | float]) -> float:
            return sum(known[id(p)] if id(p) in known else float(p) for p in parts)

        counts = {name: sum_of(parts) for name, parts in self._counts.items()}
        counts = dict.fromkeys(self._totals, counts.get(uncounted, 0)) | counts
        means = {
            name: sum_of(self._totals[name]) / count
            for name, count in counts.items()
            if count > 0 and name in self._totals
        }
        self._totals.clear()
        self._counts.clear()
        return means


# --- the settings that were used ----------------------------------------------------------------

Setting = TypeVar("Setting", bound=float | None)

FROM_OPTIMIZER = ("lr", "eps", "weight_decay")


class EffectiveSettings:
    """The latest value of every setting that was used since the last `pop`.

    A setting travels far: YAML, Tune, a config, perhaps a checkpoint of another trial, a learner in
    another process. What is reported under `effective/` is read at the end of that way: from the
    optimiser's parameter groups, and where a coefficient meets the loss.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def use(self, name: str, value: Setting) -> Setting:
        """Returns `value`, and records it; None, a setting that is off, is left out."""
        if value is not None:
            self._values[name] = float(value)
        return value

    def read_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes learning rate and the other settings of the step that `optimizer` took."""
        group = optimizer.param_groups[0]
        if "betas" not in group:  # Muon's; AdamW has the rest
            return
        for name in FROM_OPTIMIZER:
            self.use("adam_epsilon" if name == "eps" else name, group[name])
        for i, beta in enumerate(group["betas"], start=1):
            self.use(f"adam_beta{i}", beta)

    def pop(self) -> dict[str, float]:
        """All values by name, then forgets them."""
        values, self._values = self._values, {}
        return values


# --- updates that are not finite ----------------------------------------------------------------

logger = logging.getLogger(__name__)
MAX_IN_A_ROW = 3


class RefusedUpdates:
    """Counts one learner's refused updates and gives up after several in a row."""

    def __init__(self, folder: str | None, rank: int):
        """`folder`: where mini-batches go; None: a new one among the system's temporary files."""
        self._folder = folder
        self._rank = rank
        self.num_refused = 0
        self.num_in_a_row = 0  # the learner sets it to 0 after every step it takes

    def refuse(
        self, loss: torch.Tensor, norm: torch.Tensor, minibatch: dict[str, torch.Tensor]
    ) -> None:
        """Writes the mini-batch to disk; the caller leaves weights and optimiser as they are.

        loss, norm: [], of the whole mini-batch.

        Raises:
            FloatingPointError: it happened `MAX_IN_A_ROW` times in a row.
        """
        self.num_refused += 1
        self.num_in_a_row += 1
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="rllib_llm_refused_")
        folder = Path(self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"refused_batch_{self.num_refused}_{self._rank}.pt"
        # Who looks at it may have no GPU.
        torch.save({name: column.cpu() for name, column in minibatch.items()}, path)
        message = (f"loss={loss.item()} and gradient norm={norm.item()} must be finite: the update "
                   f"was refused, its mini-batch is in {path}.")  # fmt: skip
        logger.error(message)
        if self.num_in_a_row >= MAX_IN_A_ROW:
            remedy = "lower lr, or look at the scores in that batch"
            raise FloatingPointError(f"{message} {self.num_in_a_row} times in a row: {remedy}.")
