"""Rows by position: every row once per epoch, in an order of its own, the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_llm.data.rows import EpochOrder, permuted
from rllib_llm.shared.errors import Problems


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


@pytest.mark.parametrize("seed", [-1, 2**64, "1", None, 0.5])
def test_what_is_no_seed_is_refused_at_once(seed):
    with pytest.raises(Problems, match="seed=.* must be a whole number from 0 to"):
        EpochOrder(4, seed=seed)


def by_the_definition(place: int, size: int, seed: int, stream: int) -> int:
    """The cipher in Python's own numbers: eight Feistel rounds of SplitMix64 on the bits of a
    square, again until the value is one of the range."""
    keys = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).random_raw(8)
    bits = 0
    while 4**bits < size:
        bits += 1
    value = place
    while True:
        left, right = divmod(value, 2**bits)
        for key in keys:
            mixed = right ^ int(key)
            mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ (mixed ^ mixed >> 31) % 2**bits
        value = left * 2**bits + right
        if value < size:
            return value


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 64, 100, 1000])
def test_the_permutation_is_the_cipher(size):
    ours = permuted(np.arange(size), size, 5, 2)
    assert ours.tolist() == [by_the_definition(place, size, 5, 2) for place in range(size)]
    assert sorted(ours.tolist()) == list(range(size))


def test_a_place_among_a_hundred_million_costs_no_table():
    places = np.array([0, 10**8 - 1])
    ours = permuted(places, 10**8, 3, 1)
    assert ours.tolist() == [by_the_definition(int(place), 10**8, 3, 1) for place in places]


def test_all_orders_of_four_rows_come_about_as_often():
    orders = [tuple(permuted(np.arange(4), 4, seed, 0)) for seed in range(4800)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    chi_square = float(((counts - 200) ** 2 / 200).sum())
    assert len(counts) == 24
    assert chi_square < 49.7  # 23 degrees of freedom: one in a thousand is above
