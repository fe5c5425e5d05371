"""Cutting a batch: nothing lost, nothing twice, budgets kept, dead columns off."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_llm.learners.batching import (
    balanced_shares,
    even_micro_batches,
    micro_batch_indices,
    minibatch_indices,
    restore_rows,
    row_lengths,
    take_rows,
    trim,
)
from rllib_llm.modules.packing import token_batches
from rllib_llm.shared import columns


def rollouts(prompt_lengths: list[int], completion_lengths: list[int], pad: int = 2):
    """A batch whose prompt tokens are 1, completion tokens 2, advantages their column number."""
    longest_prompt, longest = max(prompt_lengths) + pad, max(completion_lengths) + pad
    prompt_mask = torch.arange(longest_prompt) >= longest_prompt - torch.tensor(
        prompt_lengths
    ).unsqueeze(1)
    completion_mask = torch.arange(longest) < torch.tensor(completion_lengths).unsqueeze(1)
    return {
        columns.PROMPT_IDS: prompt_mask.long(),
        columns.PROMPT_MASK: prompt_mask,
        columns.COMPLETION_IDS: completion_mask.long() * 2,
        columns.COMPLETION_MASK: completion_mask,
        columns.ADVANTAGES: torch.arange(longest).float().expand(len(prompt_lengths), -1),
        columns.SCORES: torch.arange(float(len(prompt_lengths))),
    }


# --- mini-batches --------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    num_rows=st.integers(1, 48),
    size=st.integers(1, 20),
    num_epochs=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_every_row_once_per_epoch(num_rows, size, num_epochs, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = list(minibatch_indices(num_rows, size, num_epochs, generator))
    per_epoch = -(-num_rows // size)
    assert len(parts) == per_epoch * num_epochs
    for epoch in range(num_epochs):
        epoch_parts = parts[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert torch.cat(epoch_parts).sort().values.tolist() == list(range(num_rows))
        assert all(len(part) == size for part in epoch_parts[:-1])


def test_epochs_are_shuffled_anew_and_repeat_with_the_seed():
    first, second = minibatch_indices(64, 64, 2, torch.Generator().manual_seed(1))
    assert not torch.equal(first, second)
    again, _ = minibatch_indices(64, 64, 2, torch.Generator().manual_seed(1))
    assert torch.equal(first, again)


def test_sizes_that_do_not_divide_leave_a_smaller_last_minibatch():
    assert [len(part) for part in minibatch_indices(10, 4)] == [4, 4, 2]
    assert [len(part) for part in minibatch_indices(3, 8)] == [3]
    assert [len(part) for part in minibatch_indices(6, None)] == [6]


# --- micro-batches -------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_batches_by_tokens_keep_every_row_and_the_budget(lengths, budget):
    parts = token_batches(torch.tensor(lengths), budget)
    assert torch.cat(parts).sort().values.tolist() == list(range(len(lengths)))
    for part in parts:
        padded_tokens = len(part) * max(lengths[row] for row in part.tolist())
        assert padded_tokens <= budget or len(part) == 1


def test_row_lengths_count_all_sequences_of_a_row():
    assert row_lengths(rollouts([3, 1], [2, 5])).tolist() == [5, 6]
    pairs = {
        columns.CHOSEN_MASK: torch.tensor([[True, True]]),
        columns.REJECTED_MASK: torch.tensor([[True, False]]),
    }
    assert row_lengths(pairs).tolist() == [3]
    with pytest.raises(AssertionError, match=r"has a mask, and this has \['scores'\]"):
        row_lengths({columns.SCORES: torch.zeros(2)})


def test_micro_batches_hold_every_row_once_without_dead_columns():
    batch = rollouts([3, 1, 2, 1, 3], [2, 5, 1, 1, 4])
    for options in ({"micro_batch_size": 2}, {"token_budget": 12}, {}):
        rows = micro_batch_indices(row_lengths(batch), **options)
        parts = [trim(take_rows(batch, index)) for index in rows]
        seen = torch.cat([part[columns.SCORES] for part in parts])
        assert seen.sort().values.tolist() == [0, 1, 2, 3, 4]
        for part in parts:
            assert part[columns.PROMPT_MASK][:, 0].any()
            assert part[columns.COMPLETION_MASK][:, -1].any()
            assert part[columns.ADVANTAGES].shape == part[columns.COMPLETION_MASK].shape


def test_micro_batches_of_rows_of_similar_length():
    batch = rollouts([1, 1, 1, 1], [9, 1, 8, 2])
    rows = micro_batch_indices(row_lengths(batch), micro_batch_size=2)
    assert [part.tolist() for part in rows] == [[0, 2], [3, 1]]
    assert [part.tolist() for part in micro_batch_indices(row_lengths(batch))] == [[0, 1, 2, 3]]


def test_restore_rows_undoes_the_cut():
    batch = rollouts([3, 1, 2, 1, 3], [2, 5, 1, 1, 4])
    rows = micro_batch_indices(row_lengths(batch), token_budget=12)
    parts = [trim(take_rows(batch, index))[columns.ADVANTAGES] for index in rows]
    masks = [trim(take_rows(batch, index))[columns.COMPLETION_MASK] for index in rows]
    mask = batch[columns.COMPLETION_MASK]
    assert torch.equal(restore_rows(torch.zeros_like(mask), masks, rows), mask)
    restored = restore_rows(torch.zeros(mask.shape), parts, rows)
    assert torch.equal(restored * mask, batch[columns.ADVANTAGES] * mask)


# --- trimming ------------------------------------------------------------------------------------


def test_trim_cuts_prompts_left_and_completions_right():
    trimmed = trim(rollouts([3, 1], [2, 4], pad=5))
    assert trimmed[columns.PROMPT_IDS].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert trimmed[columns.COMPLETION_IDS].tolist() == [[2, 2, 0, 0], [2, 2, 2, 2]]
    assert trimmed[columns.ADVANTAGES].tolist() == [[0, 1, 2, 3]] * 2
    assert trimmed[columns.SCORES].tolist() == [0, 1]


def test_trim_keeps_holes_and_one_column_at_least():
    hole = {columns.COMPLETION_MASK: torch.tensor([[True, False, False, True, False]])}
    assert trim(hole)[columns.COMPLETION_MASK].tolist() == [[True, False, False, True]]
    empty = rollouts([1, 1], [0, 0], pad=3)
    assert trim(empty)[columns.COMPLETION_MASK].shape == (2, 1)


def test_trim_texts_and_pairs():
    texts = {
        columns.INPUT_IDS: torch.tensor([[5, 6, 0, 0]]),
        columns.ATTENTION_MASK: torch.tensor([[True, True, False, False]]),
        columns.LOSS_MASK: torch.tensor([[False, True, False, False]]),
    }
    assert {name: column.tolist() for name, column in trim(texts).items()} == {
        columns.INPUT_IDS: [[5, 6]],
        columns.ATTENTION_MASK: [[True, True]],
        columns.LOSS_MASK: [[False, True]],
    }
    pairs = {
        columns.CHOSEN_IDS: torch.tensor([[5, 6, 0]]),
        columns.CHOSEN_MASK: torch.tensor([[True, True, False]]),
        columns.REJECTED_IDS: torch.tensor([[7, 0, 0]]),
        columns.REJECTED_MASK: torch.tensor([[True, False, False]]),
    }
    assert trim(pairs)[columns.CHOSEN_IDS].tolist() == [[5, 6]]
    assert trim(pairs)[columns.REJECTED_IDS].tolist() == [[7]]


def test_trim_does_not_change_what_it_was_given():
    batch = rollouts([1, 1], [2, 2], pad=3)
    before = {name: column.clone() for name, column in batch.items()}
    trim(batch)
    assert all(torch.equal(batch[name], before[name]) for name in before)


# --- rows of several learners ---------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=40), st.integers(1, 8))
def test_every_row_is_of_one_share_and_the_largest_is_within_graham_s_bound(lengths, num_shares):
    shares = balanced_shares(torch.tensor(lengths), num_shares)
    assert len(shares) == num_shares
    assert sorted(torch.cat(shares).tolist()) == list(range(len(lengths)))
    loads = [sum(lengths[row] for row in share.tolist()) for share in shares]
    # Bounds for Certain Multiprocessing Anomalies (Graham 1966): whoever gets the last row had no
    # more than the mean of the others before.
    bound = sum(lengths) / num_shares + (1 - 1 / num_shares) * max(lengths)
    assert max(loads) <= bound + 1e-9


@pytest.mark.parametrize("num_learners", [2, 4, 8])
def test_learners_have_equally_many_tokens_within_five_percent(num_learners):
    """256 rows whose lengths are log-normal, as those of completions that think are."""
    generator = torch.Generator().manual_seed(0)
    lengths = (200 * torch.randn(256, generator=generator).exp()).clamp(1, 4096).long()
    loads = [int(lengths[share].sum()) for share in balanced_shares(lengths, num_learners)]
    assert max(loads) <= 1.05 * sum(loads) / num_learners
    by_turns = [int(lengths[rank::num_learners].sum()) for rank in range(num_learners)]
    assert max(by_turns) > 1.05 * sum(loads) / num_learners  # as rows come


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=40),
    st.integers(1, 5),
    st.sampled_from([{}, {"micro_batch_size": 3}, {"token_budget": 500}]),
)
def test_even_micro_batches_hold_every_row_once_within_the_limits(lengths, num_shares, cut):
    shares = even_micro_batches(torch.tensor(lengths), num_shares, **cut)
    parts = [part.tolist() for share in shares for part in share]
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    for part in parts:
        longest = max(lengths[row] for row in part)
        assert len(part) <= cut.get("micro_batch_size", 40)
        assert len(part) == 1 or len(part) * longest <= cut.get("token_budget", 40 * 400)


def test_learners_that_meet_in_every_micro_batch_wait_less_than_five_percent():
    """As above, with 8192 tokens in a micro-batch; each share cut by itself would not do."""
    waits, waits_alone = [], []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        lengths = (256 * (0.6 * torch.randn(256, generator=generator)).exp()).clamp(1, 2048).long()
        shares = even_micro_batches(lengths, 4, token_budget=8192)
        tokens = [[int(lengths[part].sum()) for part in share] for share in shares]
        slowest = (max(each) for each in itertools.zip_longest(*tokens, fillvalue=0))
        waits.append(sum(slowest) / (int(lengths.sum()) / 4) - 1)
        alone = [
            [int(lengths[rows][part].sum()) for part in
             micro_batch_indices(lengths[rows], token_budget=8192)]
            for rows in balanced_shares(lengths, 4)
        ]  # fmt: skip
        slowest = (max(each) for each in itertools.zip_longest(*alone, fillvalue=0))
        waits_alone.append(sum(slowest) / (int(lengths.sum()) / 4) - 1)
    assert sum(waits) / len(waits) <= 0.05 and max(waits) <= 0.05
    assert sum(waits_alone) / len(waits_alone) > 0.05


def test_one_learner_has_the_rows_as_they_are():
    (share,) = balanced_shares(torch.tensor([5, 9, 1]), 1)
    assert share.tolist() == [0, 1, 2]
