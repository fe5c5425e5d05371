"""Noise is a pure function of (seed, row id), uniform, and independent between rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rllib_llm.engines.protocol import Noise, uniform_noise
from rllib_llm.shared.errors import Problems


def test_numbers_are_those_of_philox_keyed_by_seed_and_row():
    # The definition, spelled out: 64-bit words of Philox4x64-10 from counter 0, low half first,
    # the upper 24 bits of each half over 2**24.
    words = np.random.Philox(key=np.array([7, 1000], dtype=np.uint64)).random_raw(2)
    halves = [word >> shift & 0xFFFFFFFF for word in map(int, words) for shift in (0, 32)]

    noise = uniform_noise(7, [1000], 4)

    assert noise.dtype == torch.float32
    assert noise.tolist() == [[(half >> 8) / 2**24 for half in halves]]


def test_recorded_numbers_stay():
    # Recorded with NumPy 2.4: raw Philox words are among the streams NumPy keeps between versions.
    recorded = [0.8620584011077881, 0.9342820048332214, 0.2702667713165283, 0.07916146516799927]
    assert uniform_noise(3, [0], 4)[0].tolist() == pytest.approx(recorded, abs=1e-7)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    together = uniform_noise(1, torch.tensor([5, 0, 2**40, 9]), 16)

    for i, row in enumerate((5, 0, 2**40, 9)):
        assert torch.equal(uniform_noise(1, [row], 16)[0], together[i])


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8])
def test_a_longer_draw_starts_with_the_shorter_one(length):
    assert torch.equal(
        uniform_noise(1, range(3), 9)[:, :length], uniform_noise(1, range(3), length)
    )


def test_rows_and_seeds_differ():
    assert not torch.equal(uniform_noise(1, [0], 8), uniform_noise(1, [1], 8))
    assert not torch.equal(uniform_noise(1, [0], 8), uniform_noise(2, [0], 8))
    # (seed, row) is not folded into one number: swapping them gives another stream.
    assert not torch.equal(uniform_noise(1, [2], 8), uniform_noise(2, [1], 8))


def test_turns_have_streams_of_their_own_and_the_first_is_as_before():
    words = np.random.Philox(key=[7, 1000], counter=[0, 0, 0, 5]).random_raw(1)
    assert uniform_noise(7, [1000], 1, turn=5).item() == (int(words[0]) & 0xFFFFFFFF) // 256 / 2**24
    assert torch.equal(uniform_noise(1, [3], 8, turn=0), uniform_noise(1, [3], 8))
    streams = {tuple(uniform_noise(1, [3], 8, turn)[0].tolist()) for turn in range(50)}
    assert len(streams) == 50
    assert Noise(1, 3, 0).one_seed == Noise(1, 3).one_seed != Noise(1, 3, 1).one_seed


def test_numbers_are_uniform_along_rows_and_across_rows():
    noise = uniform_noise(11, range(500), 200).numpy()

    assert noise.min() >= 0.0
    assert noise.max() < 1.0
    # 100 bins of 1000 expected: chi-square with 99 degrees of freedom, 99.9 % point 148.2.
    counts = np.histogram(noise, bins=100, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 148.2
    # Per column (the first token of every row, ...) 20 bins of 25: 19 degrees, 99.99 % point 52.4
    # (200 columns are looked at).
    for column in noise.T:
        counts = np.histogram(column, bins=20, range=(0, 1))[0]
        assert ((counts - 25) ** 2 / 25).sum() < 52.4


def test_neighbouring_rows_and_tokens_are_uncorrelated():
    noise = uniform_noise(12, range(400), 250).numpy() - 0.5
    # The mean of products of independent uniforms has the standard deviation 1/12/sqrt(count).
    for left, right in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1])):
        assert abs((left * right).mean()) < 4 / 12 / np.sqrt(left.size)


def test_no_rows_and_no_numbers():
    assert uniform_noise(1, [], 4).shape == (0, 4)
    assert uniform_noise(1, [1, 2], 0).shape == (2, 0)


def test_the_largest_seed_is_allowed():
    uniform_noise(2**64 - 1, [2**62], 1)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_named(seed):
    for draw in (lambda: uniform_noise(seed, [0], 1), lambda: Noise(seed).one_seed):
        with pytest.raises(Problems) as caught:
            draw()
        assert (caught.value.problem.name, caught.value.problem.value) == ("seed", seed)


def test_seeds_of_rows_are_a_function_of_seed_and_row():
    seeds = [Noise(3, row).one_seed for row in (7, 8, 7)]
    assert seeds[0] == seeds[2] != seeds[1]
    assert Noise(4, 7).one_seed != seeds[0]
    # 64 random bits less one: numbers that a signed 64-bit field holds.
    seeds = [Noise(3, row).one_seed for row in range(1000)]
    assert all(0 <= seed < 2**63 for seed in seeds) and len(set(seeds)) == 1000
