"""Rows by position: every row once per epoch, in an order of its own, the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_llm.data.order import EpochOrder, permutation


def test_every_epoch_has_every_row_once_and_an_order_of_its_own():
    epochs = EpochOrder(7, seed=3).indices(0, 21).reshape(3, 7)
    for epoch in epochs:
        assert sorted(epoch) == list(range(7))
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("cuts", [[5, 5, 5, 5], [1, 19], [13, 7]])
def test_a_position_means_the_same_row_however_it_is_reached(cuts):
    whole = EpochOrder(7, seed=3).indices(0, 20)
    order, position, parts = EpochOrder(7, seed=3), 0, []
    for count in cuts:
        parts.append(order.indices(position, count))
        position += count
    assert np.array_equal(np.concatenate(parts), whole)
    assert np.array_equal(EpochOrder(7, seed=3).indices(15, 5), whole[15:])


def test_one_call_may_span_several_epochs():
    assert EpochOrder(2, shuffle=False).indices(1, 5).tolist() == [1, 0, 1, 0, 1]


def test_seeds_differ_and_unshuffled_rows_come_as_they_are():
    one, other = (EpochOrder(50, seed=seed).indices(0, 50) for seed in (0, 1))
    assert not np.array_equal(one, other)
    assert EpochOrder(4, shuffle=False).indices(2, 4).tolist() == [2, 3, 0, 1]


def test_the_permutation_sorts_the_words_of_philox():
    # Recorded: the first words of Philox4x64-10 with key (0, 0) and a counter of 1 on (Random123).
    words = np.random.Philox(key=np.zeros(2, dtype=np.uint64)).random_raw(6)
    assert permutation(6, 0, 0).tolist() == sorted(range(6), key=lambda i: words[i])
    assert sorted(permutation(1000, 5, 2).tolist()) == list(range(1000))
