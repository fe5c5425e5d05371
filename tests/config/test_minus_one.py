"""Values of -1, which RLlib reads as "not given", are refused also where a config is built."""

from __future__ import annotations

import pytest

from rllib_llm.shared.errors import Problems
from tests.algorithms import tiny_runs as tiny


@pytest.mark.parametrize("settings", [{"lr": -1}, {"clip_param": -1}, {"num_epochs": -1}])
def test_minus_one_is_refused_before_an_algorithm_is_built(settings: dict):
    config = tiny.grpo().training(**settings)
    with pytest.raises(Problems) as caught:
        config.build_algo()
    assert [(each.name, each.value) for each in caught.value.found] == [*settings.items()]
