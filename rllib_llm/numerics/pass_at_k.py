"""pass@k, pass^k and maj@k from n samples of each prompt: exact, without resampling.

Each is the mean over all C(n, k) choices of k of the n samples, so that it is unbiased for k <= n
(Chen et al. 2021, eq. 1, for pass@k; Yao et al. 2024, tau-bench, for pass^k).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from math import comb

import torch
from torch import Tensor


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Chance that at least one of k samples is right: 1 - C(n - c, k) / C(n, k)."""
    assert 0 <= num_right <= num_samples and 1 <= k <= num_samples, (num_right, num_samples, k)
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def pass_hat_k(num_right: int, num_samples: int, k: int) -> float:
    """Chance that all of k samples are right, pass^k: C(c, k) / C(n, k)."""
    assert 0 <= num_right <= num_samples and 1 <= k <= num_samples, (num_right, num_samples, k)
    return comb(num_right, k) / comb(num_samples, k)


def majority_at_k(answers: Sequence[Hashable], right: Hashable, k: int) -> float:
    """Chance that the most frequent of k samples' answers is the right one, maj@k.

    `answers`: of the n samples. Where several answers are as frequent, each wins alike. Choices are
    counted, not drawn: ways[s][t] is in how many ways s samples of the other answers can be chosen
    with none oftener than the right one and t as often.
    """
    counts = Counter(answers)
    assert 1 <= k <= len(answers), (len(answers), k)
    others = [count for answer, count in counts.items() if answer != right]
    won = 0.0
    for most in range(1, min(counts[right], k) + 1):
        ways = {(0, 0): 1}
        for count in others:
            longer: Counter[tuple[int, int]] = Counter()
            for (chosen, ties), number in ways.items():
                for more in range(min(count, most, k - most - chosen) + 1):
                    place = (chosen + more, ties + (more == most))
                    longer[place] += number * comb(count, more)
            ways = dict(longer)
        share = sum(n / (ties + 1) for (chosen, ties), n in ways.items() if chosen == k - most)
        won += comb(counts[right], most) * share
    return won / comb(len(answers), k)


def bootstrap_interval(
    per_prompt: Tensor, *, confidence: float = 0.95, num_draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean of `per_prompt` [prompts], whole prompts drawn with
    replacement (Efron & Tibshirani 1993, chapter 13)."""
    assert 0 < confidence < 1 and per_prompt.ndim == 1 and len(per_prompt), per_prompt.shape
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(per_prompt), (num_draws, len(per_prompt)), generator=generator)
    means = per_prompt.double()[draws].mean(dim=1)
    edges = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    low, high = torch.quantile(means, edges).tolist()
    return low, high


def rates(
    right: Tensor, groups: Tensor, valid: Tensor, ks: Sequence[int]
) -> dict[str, tuple[float, float, float]]:
    """{"pass@k", "pass^k": (mean over prompts, low, high)} of a batch.

    right, valid [batch] bool; groups [batch] int64: rows alike in it are samples of one prompt.
    Rows that are not valid are no samples; a prompt with fewer than k does not count at k, and a k
    that no prompt has samples for is left out.
    """
    tallies: dict[int, list[int]] = {}
    for group, is_right, counts in zip(
        groups.tolist(), right.tolist(), valid.tolist(), strict=True
    ):
        tally = tallies.setdefault(group, [0, 0])
        tally[0] += bool(is_right and counts)
        tally[1] += bool(counts)
    found = {}
    for k in ks:
        enough = [(c, n) for c, n in tallies.values() if n >= k]
        for name, chance in (("pass@", pass_at_k), ("pass^", pass_hat_k)):
            if enough:
                found[f"{name}{k}"] = _with_interval([chance(c, n, k) for c, n in enough])
    return found


def majority_rates(
    answers: Sequence[Hashable], right: Tensor, groups: Tensor, valid: Tensor, ks: Sequence[int]
) -> dict[str, tuple[float, float, float]]:
    """{"maj@k": (mean over prompts, low, high)} of a batch: majority votes of k samples. An answer
    counts as right if more than half of the samples that gave it were.

    answers: [batch], None where a sample gives none: such samples vote together, for nothing that
    is right. The rest as of `rates`.
    """
    votes: dict[int, list[tuple[Hashable, bool]]] = {}
    for answer, group, is_right, counts in zip(
        answers, groups.tolist(), right.tolist(), valid.tolist(), strict=True
    ):
        if counts:
            votes.setdefault(group, []).append((answer, bool(is_right)))
    found = {}
    for k in ks:
        enough = [cast for cast in votes.values() if len(cast) >= k]
        chances = []  # that a right answer wins the vote of k samples
        for cast in enough:
            given = [answer for answer, _ in cast]
            num_right = Counter(one for one, is_right in cast if is_right and one is not None)
            winners = [one for one, count in num_right.items() if 2 * count > given.count(one)]
            chances.append(sum((majority_at_k(given, winner, k) for winner in winners), 0.0))
        if chances:
            found[f"maj@{k}"] = _with_interval(chances)
    return found


def _with_interval(chances: Sequence[float]) -> tuple[float, float, float]:
    column = torch.tensor(chances)
    return float(column.mean()), *bootstrap_interval(column)
