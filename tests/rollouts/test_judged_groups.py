"""Groups that share a batch are those that are handed in alone."""

from __future__ import annotations

import dataclasses

import torch

from rllib_llm.rollouts.judged_batch import (
    JudgedBatch,
    as_bytes,
    batch_of,
    judged_group,
    judged_groups,
    split,
    unpack,
)
from rllib_llm.shared import columns

LENGTHS = torch.tensor([3, 1, 2, 4, 2, 2])
POSITIONS = [4, 4, 5, 5, 6, 6]
VALID = torch.tensor([True, False, True, True, False, False])


def batch(replica=1, seconds=1.0):
    """Three groups: one that lost a member, a whole one, one without a score."""
    mask = torch.arange(4) < LENGTHS.unsqueeze(1)
    ones = torch.ones(6, 2, dtype=torch.int64)
    versions = torch.tensor([3, 3, 2, 3, 3, 3], dtype=torch.int32).unsqueeze(1)
    held = {
        columns.PROMPT_IDS: ones, columns.PROMPT_MASK: ones.bool(),
        columns.COMPLETION_IDS: mask.long(), columns.COMPLETION_MASK: mask,
        columns.WEIGHTS_VERSION: versions.where(mask, columns.NO_VERSION),
        columns.GROUP: torch.tensor(POSITIONS), columns.VALID: VALID,
        columns.REPLICA: torch.full((6,), replica),
    }  # fmt: skip
    return JudgedBatch(held, VALID.float(), timings={"judge_seconds": seconds}, cause="KeyError")


def test_what_is_told_of_groups_of_a_batch_is_what_is_told_of_each_alone():
    together = judged_groups(batch(), min_valid=2)
    alone = [judged_group(part, min_valid=2) for part in split(batch())]
    for one, other in zip(together, alone, strict=True):
        assert dataclasses.replace(one, payload=b"") == dataclasses.replace(other, payload=b"")
        kept = unpack(as_bytes(one).payload), unpack(other.payload)
        for name, column in kept[1].columns.items():
            assert kept[0].columns[name].equal(column), name
    assert [group.reason for group in together] == ["too_few", "", "unjudged"]
    assert [group.num_tokens for group in together] == [4, 6, 4]
    assert [group.num_lost for group in together] == [1, 0, 4]
    assert [group.oldest_version for group in together] == [3, 2, 3]


def test_a_whole_batch_is_handed_out_as_it_is_and_others_without_what_was_rejected():
    whole = batch()
    groups = judged_groups(whole)
    assert batch_of(groups) is whole
    assert batch_of(groups[1:]).columns[columns.GROUP].tolist() == [5, 5, 6, 6]


def test_who_spent_most_on_all_its_parts_was_waited_for():
    parts = [batch(1, 1.0), batch(2, 1.5), batch(1, 1.0)]
    groups = [group for part in parts for group in judged_groups(part)]
    assert batch_of(groups).timings == {"judge_seconds": 2.0}
