"""Tests by all combinations of several parameters' values, of which a few are fast."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest


def crossed(strength: int = 1, **values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrises a test by all combinations of the values.

    Few of them are fast: each value is in one (`strength` 1), or each pair of two parameters'
    values (`strength` 2). The others are slow, and `covered`: shaken runs have them, too.
    """
    product = [*itertools.product(*(range(len(each)) for each in values.values()))]
    met = {places: {*itertools.combinations(enumerate(places), strength)} for places in product}
    missing, fast, used = set().union(*met.values()), set(), Counter()
    while missing:
        best = max(product, key=lambda places: (
            len(met[places] & missing), -sum(used[value] for value in enumerate(places))
        ))  # fmt: skip
        fast.add(best)
        missing -= met[best]
        used.update(enumerate(best))
    return pytest.mark.parametrize([*values], [
        pytest.param(
            *(each[place] for each, place in zip(values.values(), places, strict=True)),
            marks=() if places in fast else (pytest.mark.slow, pytest.mark.covered),
        )
        for places in product
    ])  # fmt: skip
