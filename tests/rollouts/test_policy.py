"""What a sampler asks of an engine of whole batches, and what it makes of the answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Ended, Noise, Row
from rllib_llm.rollouts.policy import EnginePolicy, Generation
from rllib_llm.shared import columns


class Scripted:
    """Repeats a row's number as often as its prompt has tokens."""

    takes_weights = False

    def __init__(self, *, knows_versions: bool) -> None:
        self.knows_versions = knows_versions
        self.asked: list[tuple[list[Row], tuple[int, int] | None]] = []

    def complete(self, rows: Sequence[Row], weights: tuple[int, int] | None) -> list[Ended]:
        self.asked.append((list(rows), weights))
        lengths = [len(row.token_ids) for row in rows]
        return [
            Ended(i, [row.noise.row] * n, [-0.5] * n, [7] * n, "stop" if n == 1 else "length")
            for i, (row, n) in enumerate(zip(rows, lengths, strict=True))
        ]

    def close(self) -> None:
        """Holds nothing."""


@pytest.mark.parametrize("knows_versions", [False, True])
def test_an_engine_is_asked_for_every_completion_of_a_batch(knows_versions):
    engine, params = Scripted(knows_versions=knows_versions), SamplingParams(0, max_new_tokens=4)
    prompts = {
        columns.PROMPT_IDS: torch.tensor([[0, 0, 5], [6, 7, 8]]),
        columns.PROMPT_MASK: torch.tensor([[False, False, True], [True, True, True]]),
    }
    asked = Generation(params, 2, 9, torch.tensor([40, 41, 42, 43]), weights=(3, 12))
    made = EnginePolicy(engine).generate(prompts, asked)
    ((rows, weights),) = engine.asked
    # Two completions of each prompt, without its padding, those of a prompt adjacent.
    assert [list(row.token_ids) for row in rows] == [[5], [5], [6, 7, 8], [6, 7, 8]]
    assert [row.noise for row in rows] == [Noise(9, row) for row in (40, 41, 42, 43)]
    assert len({row.id for row in rows}) == 4 and all(row.params == params for row in rows)
    assert weights == (3, 12)
    ids = [[40, 0, 0], [41, 0, 0], [42] * 3, [43] * 3]
    assert made[columns.COMPLETION_IDS].tolist() == ids
    assert made[columns.COMPLETION_MASK].sum(dim=1).tolist() == [1, 1, 3, 3]
    assert made[columns.FINISHED].tolist() == [True, True, False, False]
    # Of an engine that does not know them the sampler's own are stamped.
    assert (columns.WEIGHTS_VERSION in made) == knows_versions
    if knows_versions:
        versions = made[columns.WEIGHTS_VERSION][made[columns.COMPLETION_MASK]]
        assert versions.tolist() == [7] * 8
