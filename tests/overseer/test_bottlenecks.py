"""What holds a run up is recognised in real runs, each with another part made slow."""

from __future__ import annotations

import pytest

from tests.overseer.bottlenecks import STAGES, staged

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]


@pytest.mark.parametrize("name", STAGES)
def test_a_staged_bottleneck_is_recognised(name):
    stage = STAGES[name]
    found, off = staged(stage.make(), num_iterations=3)
    assert found.bound == stage.bound, found
    assert stage.words in found.text
    assert off <= 0.02
