"""Groups that were learnt from once, kept to be learnt from again after a batch's fresh ones."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rllib_llm.rollouts.judged_batch import JudgedBatch, concatenate, take_rows
from rllib_llm.shared import columns


@dataclass
class _Kept:
    """One group: its rows, and how often they were learnt from."""

    rows: JudgedBatch
    iteration: int  # in which it was added
    uses: int = 1  # the first was when it was fresh

    @property
    def env(self) -> int:
        """The number of its environment."""
        numbers = self.rows.columns.get(columns.ENVIRONMENT)
        return 0 if numbers is None else int(numbers[0])


class ReplayBuffer:
    """Whole groups by age, the oldest first; draws depend on seed and iteration alone.

    Args:
        num_groups: drawn for each batch, fewer while there are fewer.
        capacity: groups that it holds at most; the oldest go.
        max_uses: after so many, the first included, a group goes.
        recency: α ≥ 0; the i-th oldest, from 1 on, is drawn with weight i^α (0: all alike).
        env_names: of several environments, for the metrics of each.
    """

    def __init__(
        self, *, num_groups: int, capacity: int, max_uses: int = 4, recency: float = 0.0,
        seed: int = 0, env_names: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.num_groups = num_groups
        self.iteration = 0  # batches handed out
        self._capacity = capacity
        self._max_uses = max_uses
        self._recency = recency
        self._seed, self._env_names = seed, env_names if len(env_names) > 1 else ()
        self._kept: list[_Kept] = []
        self._counts = Counter({"added": 0, "drawn": 0, "evicted": 0, "used_up": 0})
        self._extended = time.monotonic()
        self._of_batch: dict[str, float] = {}  # metrics of the last one

    def __len__(self) -> int:
        return len(self._kept)

    def extend(self, fresh: JudgedBatch) -> JudgedBatch:
        """A fresh batch followed by groups of earlier ones, counted by `num_replayed`; the buffer
        has the fresh ones from now on."""
        self.iteration += 1
        before, start = self._counts.copy(), self._extended
        if columns.REF_LOGPROBS in fresh.columns:  # the environment's; else learners have them
            self._keep("evicted", lambda one: columns.REF_LOGPROBS in one.rows.columns)
        drawn = self.draw()
        self.add(fresh)
        self._extended = time.monotonic()
        new, seconds = self._counts - before, max(self._extended - start, 1e-9)
        self._of_batch = {}
        for prefix in ("", *(f"{name}/" for name in self._env_names)):
            num_added, num_drawn = new[f"{prefix}added"], new[f"{prefix}drawn"]
            self._of_batch[f"{prefix}added_per_s"] = num_added / seconds
            self._of_batch[f"{prefix}drawn_per_s"] = num_drawn / seconds
            if num := num_added + num_drawn:
                self._of_batch[f"{prefix}on_policy"] = num_added / num
        if drawn is None:
            return fresh
        drawn = dataclasses.replace(
            drawn.to(fresh.rewards.device),
            timings=dict.fromkeys(fresh.timings, 0.0),
            texts={name: drawn.texts.get(name, [""] * drawn.num_rows) for name in fresh.texts},
        )
        whole = concatenate([fresh, drawn])
        return dataclasses.replace(whole, node=fresh.node, num_replayed=drawn.num_rows)

    def add(self, batch: JudgedBatch) -> None:
        """Keeps the groups of `batch`, on the CPU; where there is no room, the oldest go."""
        batch = dataclasses.replace(batch.to("cpu"), messages=[], timings={}, weights={})
        groups = batch.columns[columns.GROUP]
        for group in groups.unique(sorted=True):
            rows = take_rows(batch, (groups == group).nonzero().squeeze(1))
            self._kept.append(_Kept(rows, self.iteration))
            self._count("added", self._kept[-1:])
        newest = {id(one) for one in self._kept[-self._capacity :]}
        self._keep("evicted", lambda one: id(one) in newest)

    def _keep(self, reason: str, is_kept: Callable[[_Kept], bool]) -> None:
        """Drops the others, which are counted by the reason."""
        self._count(reason, [one for one in self._kept if not is_kept(one)])
        self._kept = [one for one in self._kept if is_kept(one)]

    def _count(self, what: str, groups: Sequence[_Kept]) -> None:
        self._counts[what] += len(groups)
        if self._env_names:
            for one in groups:
                self._counts[f"{self._env_names[one.env]}/{what}"] += 1

    def draw(self) -> JudgedBatch | None:
        """Different groups, as many as there are at most, in the order of their age; None where
        it is empty. The same buffer gives the same groups for the same iteration."""
        count = min(self.num_groups, len(self._kept))
        if not count:
            return None
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.iteration)
        places = torch.arange(1, len(self._kept) + 1, dtype=torch.float64)
        chosen = torch.multinomial(places**self._recency, count, generator=generator).sort().values
        drawn = [self._kept[int(i)] for i in chosen]
        for kept in drawn:
            kept.uses += 1
        self._count("drawn", drawn)
        self._keep("used_up", lambda one: one.uses < self._max_uses)
        return concatenate([kept.rows for kept in drawn])

    def metrics(self) -> dict[str, float]:
        """Its size, the groups added, drawn and dropped so far, and of the first two how many in a
        second since the batch before the last; `on_policy`, the share of that batch's groups that
        were fresh, where it had any; of each of several environments `<name>/occupancy` and the
        same of its groups."""
        uses = [kept.uses for kept in self._kept]
        ages = [self.iteration - kept.iteration for kept in self._kept]
        drawn = self._counts["drawn"] / max(1, self._counts["added"])
        held = Counter(one.env for one in self._kept)
        return {
            **{f"{name}/occupancy": held[i] / self._capacity
               for i, name in enumerate(self._env_names)},
            "groups": float(len(self._kept)),
            "occupancy": len(self._kept) / self._capacity,
            "mean_uses": sum(uses) / max(1, len(uses)),
            "mean_age": sum(ages) / max(1, len(ages)),
            "reuse": drawn, **self._of_batch,
            **{name: float(count) for name, count in self._counts.items()},
        }

    def state(self) -> dict[str, Any]:
        """Its state for a checkpoint: all groups and counts."""
        kept = [
            {"rows": dict(vars(one.rows)), "iteration": one.iteration, "uses": one.uses}
            for one in self._kept
        ]
        buffer = {"kept": kept, "counts": dict(self._counts)}
        return {"iteration": self.iteration, "buffer": buffer}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores `state`; keeps the newest groups if they exceed the capacity."""
        kept = [
            _Kept(JudgedBatch(**one["rows"]), one["iteration"], one["uses"])
            for one in state["buffer"]["kept"]
        ]
        self._kept, self.iteration = kept[-self._capacity :], state["iteration"]
        self._counts = Counter(state["buffer"]["counts"])
