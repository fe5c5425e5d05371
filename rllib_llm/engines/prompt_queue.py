"""Prompts that wait for a place in the batch, first come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from rllib_llm.engines.kept_prefixes import Prefix
from rllib_llm.engines.params import SamplingParams


@dataclass(frozen=True)
class Prompts:
    """Prompts on the model's device, [groups, P] int64 and bool, left-padded."""

    ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Group:
    """Rows that share a prompt, and the place of the prompt in its batch."""

    prompts: Prompts
    index: int
    length: int
    """Tokens of the prompt, those that were sampled before among them."""
    columns: list[int]
    """Of the buffers, one per row."""
    params: list[SamplingParams]
    num_sampled: list[int]
    prefix: Prefix | None = None
    """What is computed already of the prompt of a single row."""


class PromptQueue:
    """Groups in the order in which they will be let in."""

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_rows(self) -> int:
        """Rows that wait."""
        return sum(len(group.columns) for group in self._groups)

    def put(self, groups: Sequence[Group], first: bool = False) -> None:
        """Appends groups, or lets them go `first`."""
        if first:
            self._groups.extendleft(reversed(groups))
        else:
            self._groups.extend(groups)

    def remove(self, columns: set[int]) -> None:
        """Takes rows out, by their columns of the buffers."""
        kept: deque[Group] = deque()
        for group in self._groups:
            stays = [i for i, column in enumerate(group.columns) if column not in columns]
            if len(stays) == len(group.columns):
                kept.append(group)
            elif stays:
                kept.append(
                    Group(
                        group.prompts,
                        group.index,
                        group.length,
                        [group.columns[i] for i in stays],
                        [group.params[i] for i in stays],
                        [group.num_sampled[i] for i in stays],
                    )
                )
        self._groups = kept

    def forget_prefixes(self) -> None:
        """Has all of them computed: the weights have changed."""
        self._groups = deque(replace(group, prefix=None) for group in self._groups)

    def are_turns(self) -> bool:
        """Whether all of them are further turns of conversations, whose prefixes are kept."""
        return all(group.prefix is not None for group in self._groups)

    def fitting(self, free: float, whatever: bool) -> int:
        """How many of the first groups have together at most `free` rows; one at least if
        `whatever`."""
        count = 0
        for group in self._groups:
            free -= len(group.columns)
            if free < 0 and not (whatever and not count):
                break
            count += 1
        return count

    def rows_of(self, count: int) -> int:
        """Rows of the first `count` groups."""
        return sum(len(self._groups[i].columns) for i in range(count))

    def take(self, count: int) -> list[Group]:
        """Takes the first groups out."""
        return [self._groups.popleft() for _ in range(count)]


def padded(groups: Sequence[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [groups, longest] of prompts, which need not be of one batch."""
    longest = max(group.length for group in groups)
    parts, start = [], 0
    for end in range(1, len(groups) + 1):
        # Neighbours of one batch are cut out of it together.
        if end < len(groups) and groups[end].prompts is groups[start].prompts \
                and groups[end].index == groups[end - 1].index + 1:  # fmt: skip
            continue
        held = groups[start].prompts
        rows = slice(groups[start].index, groups[end - 1].index + 1)
        width = min(longest, held.ids.shape[1])
        cut = (held.ids[rows, -width:], held.mask[rows, -width:])
        parts.append([F.pad(tensor, (longest - width, 0)) for tensor in cut])
        start = end
    ids, mask = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return ids, mask
