"""Filters of prompt groups that are worth training on; each rejection has a reason.

A filter is a function of one group, `keep, reason = filter(group)`: one of those here by name, with
settings, or a user's by dotted path. Groups that one refuses are counted by its reason
and other prompts are sampled in their place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch

from rllib_llm.rollouts.judged_batch import JudgedBatch
from rllib_llm.rollouts.schedule import Keep
from rllib_llm.shared import columns
from rllib_llm.shared.dotted import import_dotted, looks_dotted
from rllib_llm.shared.errors import did_you_mean, require


class Verdict(NamedTuple):
    """Whether a group is kept; if not, why, in one word that becomes a metric's name."""

    keep: bool
    reason: str = ""


@dataclass(frozen=True)
class RolloutGroup:
    """The rollouts of one prompt that were judged, as a filter sees them.

    position: of the prompt. scores: [n] float32. lengths: [n] int64, sampled tokens. finished: [n]
    bool, ended by a stop token. completions: token ids of each, of one that forked path after path.
    batch: all that is known of them, a row for each path.
    """

    position: int
    scores: torch.Tensor
    lengths: torch.Tensor
    finished: torch.Tensor
    completions: tuple[tuple[int, ...], ...]
    batch: JudgedBatch


Filter: TypeAlias = Callable[[RolloutGroup], tuple[bool, str]]


def rollout_group(batch: JudgedBatch) -> RolloutGroup:
    """The rollouts of one group that have a score."""
    held, whole = batch.columns, batch.rollouts
    valid = held[columns.VALID] & whole.is_first
    completions: dict[int, tuple[int, ...]] = {}
    paths = zip(held[columns.COMPLETION_IDS], held[columns.COMPLETION_MASK], strict=True)
    for owner, (ids, mask) in zip(whole.owners.tolist(), paths, strict=True):
        completions[owner] = (*completions.get(owner, ()), *ids[mask].tolist())
    return RolloutGroup(
        position=int(held[columns.GROUP][0]),
        scores=held[columns.SCORES][valid].float(),
        lengths=whole.total(batch.sampled_mask.sum(dim=1))[valid],
        finished=whole.at_end(held[columns.FINISHED])[valid],
        completions=tuple(completions[i] for i in valid.nonzero().flatten().tolist()),
        batch=batch,
    )


def reward_spread(group: RolloutGroup, *, least: float = 1e-6) -> Verdict:
    """Keeps groups whose highest and lowest score differ by more than `least`: others have no
    advantage. DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476, equation 11)."""
    spread = float(group.scores.max() - group.scores.min())
    return Verdict(spread > least, "no_spread")


def least_reward(group: RolloutGroup, *, least: float) -> Verdict:
    """Keeps groups whose best completion scores at least `least`."""
    return Verdict(float(group.scores.max()) >= least, "low_reward")


def length(group: RolloutGroup, *, least: int = 1, most: int | None = None) -> Verdict:
    """Keeps groups whose mean completion has from `least` to `most` tokens."""
    mean = float(group.lengths.float().mean())
    if mean < least:
        return Verdict(False, "too_short")
    return Verdict(most is None or mean <= most, "too_long")


def distinct(group: RolloutGroup, *, least: int = 2) -> Verdict:
    """Keeps groups with at least `least` different completions."""
    return Verdict(len(set(group.completions)) >= least, "not_distinct")


FILTERS: Mapping[str, Callable[..., tuple[bool, str]]] = MappingProxyType(
    {each.__name__: each for each in (reward_spread, least_reward, length, distinct)}
)


class Filters:
    """Filters in order; the first that rejects a group gives the reason.

    Args:
        settings: each a name of `FILTERS`, a dotted path, or {"name": one of these, and its
            settings}.

    Raises:
        Problems: no such filter, or not these settings.
    """

    def __init__(self, settings: Sequence[str | Mapping[str, Any]]) -> None:
        self._filters = [_open(each) for each in settings]

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, or dotted paths."""
        return tuple(name for name, _ in self._filters)

    def reason(self, batch: JudgedBatch) -> str:
        """Why the group, all rows of `batch`, is not to be learnt from; "" where it is.

        Raises:
            Problems: a filter gave something else than (keep, reason).
        """
        if not self._filters or not bool(batch.columns[columns.VALID].any()):
            return ""
        group = rollout_group(batch)
        for name, judge in self._filters:
            verdict = judge(group)
            is_pair = isinstance(verdict, tuple) and len(verdict) == 2
            require(is_pair, f"what filter {name!r} returned", verdict, "be (keep, reason)",
                    "", "Return (True, '') or (False, 'why')")  # fmt: skip
            keep, reason = verdict
            if not keep:
                return str(reason) or name.rpartition(".")[2]
        return ""


def merit(batch: JudgedBatch, keep: Keep) -> float:
    """The number by which groups are chosen: the standard deviation, or the mean, of the scores of
    one, all rows of `batch`; 0 where the first are kept, or none is scored."""
    if keep == "first" or not bool(batch.columns[columns.VALID].any()):
        return 0.0
    scores = rollout_group(batch).scores
    return float(scores.std(correction=0) if keep == "best_spread" else scores.mean())


def _open(setting: str | Mapping[str, Any]) -> tuple[str, Filter]:
    """The filter's name, and the filter with its settings."""
    arguments: dict[str, Any]
    arguments = dict(setting) if isinstance(setting, Mapping) else {"name": setting}
    name = str(arguments.pop("name", None))
    require(name in FILTERS or looks_dotted(name), "filters", setting,
            f"be among {sorted(FILTERS)} or a function's dotted path", "",
            did_you_mean(name, FILTERS, otherwise="Write 'reward_spread'"))  # fmt: skip
    found: Filter = FILTERS[name] if name in FILTERS else import_dotted(name, name="filters")
    return name, functools.partial(found, **arguments) if arguments else found
