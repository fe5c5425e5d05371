"""Rollouts as a trainer's arrays, by hand."""

from __future__ import annotations

import pytest

from rllib_llm.data.examples import EXAMPLE_SCHEMA, training_examples
from rllib_llm.data.rollout_store import conform
from rllib_llm.shared.errors import Problems
from tests.data.tiny_rollouts import table

ROWS = conform(table(
    {"prompt_ids": [5, 6], "completion_ids": [7, 8, 9], "loss_mask": [True, False, True],
     "logprobs": [-1.0, float("nan"), -3.0], "ref_logprobs": [-2.0, float("nan"), -4.0],
     "advantages": [0.5, 0.0, 0.5]},
    {"prompt_ids": [4], "completion_ids": [3], "logprobs": [-0.25]},
    {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-1.0, -2.0],
     "advantages": [-1.0, -1.0]},
), 1)  # fmt: skip


def test_padded_rows():
    found = training_examples(ROWS)
    assert found.schema == EXAMPLE_SCHEMA
    first, second, _ = found.to_pylist()
    assert first == {
        "input_ids": [5, 6, 7, 8, 9], "position_ids": [0, 1, 2, 3, 4],
        "segment_ids": [1, 1, 1, 1, 1], "loss_weights": [0, 0, 0.5, 0, 0.5],
        "policy_logprobs": [0, 0, -1, 0, -3], "reference_logprobs": [0, 0, -2, 0, -4],
    }  # fmt: skip
    assert second == {
        "input_ids": [4, 3, 0, 0, 0], "position_ids": [0, 1, 0, 0, 0],
        "segment_ids": [1, 1, 0, 0, 0], "loss_weights": [0, 1, 0, 0, 0],
        "policy_logprobs": [0, -0.25, 0, 0, 0], "reference_logprobs": [0, 0, 0, 0, 0],
    }  # fmt: skip


def test_packed_rows():
    first, second = training_examples(ROWS, 8).to_pylist()
    assert first["input_ids"] == [5, 6, 7, 8, 9, 4, 3, 0]
    assert first["segment_ids"] == [1, 1, 1, 1, 1, 2, 2, 0]
    assert first["position_ids"] == [0, 1, 2, 3, 4, 0, 1, 0]
    assert first["loss_weights"] == [0, 0, 0.5, 0, 0.5, 0, 1, 0]
    assert second["input_ids"] == [1, 2, 3, 4, 0, 0, 0, 0]
    assert second["loss_weights"] == [0, 0, -1, -1, 0, 0, 0, 0]


def test_a_length_that_a_rollout_exceeds_is_refused():
    with pytest.raises(Problems) as refused:
        training_examples(ROWS, 4)
    assert (refused.value.problem.name, refused.value.problem.rule) == ("--length", "be at least 5")
