"""Packing against plain Python lists of the same rows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_llm.modules.packing import WantedTokens, completion_rows, pack, text_rows


def words(wanted: WantedTokens) -> list[tuple[list[int], int]]:
    """(what the model has read, the token to predict) for each wanted token."""
    longest = wanted.input_ids.shape[1]
    return [
        (wanted.input_ids[at // longest, : at % longest + 1].tolist(), target)
        for at, target in zip(wanted.predicted_at.tolist(), wanted.targets.tolist(), strict=True)
    ]


def mask_of(rows: list[str]) -> torch.Tensor:
    return torch.tensor([[char == "1" for char in row] for row in rows])


def test_hand_worked_rows():
    # Row 0: prompt 5, completion 6 7. Row 1: prompt 3 4, completion 8, tool output 9, then 1.
    wanted = pack(
        completion_rows(
            torch.tensor([[0, 5], [3, 4]]),
            mask_of(["01", "11"]),
            torch.tensor([[6, 7, 0, 0], [8, 9, 1, 0]]),
            mask_of(["1100", "1010"]),
        )
    )
    assert wanted.input_ids.tolist() == [[5, 6, 7, 5, 5], [3, 4, 8, 9, 1]]
    assert words(wanted) == [([5], 6), ([5, 6], 7), ([3, 4], 8), ([3, 4, 8, 9], 1)]
    answers = wanted.unpack(torch.tensor([10.0, 20.0, 30.0, 40.0]))
    assert answers.tolist() == [[10, 20, 0, 0], [30, 0, 40, 0]]


def test_a_texts_first_token_is_not_wanted():
    wanted = pack(text_rows(torch.tensor([[7, 8, 9]]), mask_of(["111"]), None))
    assert words(wanted) == [([7], 8), ([7, 8], 9)]
    assert wanted.unpack(torch.tensor([1.0, 2.0])).tolist() == [[0, 1, 2]]
    masked = text_rows(torch.tensor([[7, 8, 9]]), mask_of(["111"]), mask_of(["101"]))
    assert words(pack(masked)) == [([7, 8], 9)]


def test_pick_takes_the_positions_that_predict():
    wanted = pack(
        completion_rows(
            torch.tensor([[5]]), mask_of(["1"]), torch.tensor([[6, 7]]), mask_of(["11"])
        )
    )
    states = torch.arange(6.0).view(1, 3, 2)
    assert wanted.pick(states).tolist() == [[0, 1], [2, 3]]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.booleans(), min_size=4, max_size=4).filter(any),
            st.lists(st.booleans(), min_size=5, max_size=5),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_masks_give_the_rows_that_lists_give(masks):
    num_rows = len(masks)
    prompt_mask = torch.tensor([prompt for prompt, _ in masks])
    completion_mask = torch.tensor([completion for _, completion in masks])
    prompt_ids = torch.arange(100, 100 + num_rows * 4).view(num_rows, 4)
    completion_ids = torch.arange(500, 500 + num_rows * 5).view(num_rows, 5)
    expected = []
    for row, (prompt, completion) in enumerate(masks):
        read = [int(prompt_ids[row, col]) for col in range(4) if prompt[col]]
        for col in range(5):
            token = int(completion_ids[row, col])
            if completion[col]:
                expected.append((list(read), token))
            read.append(token)
    wanted = pack(completion_rows(prompt_ids, prompt_mask, completion_ids, completion_mask))
    assert words(wanted) == expected
    targets = wanted.unpack(wanted.targets)
    assert torch.equal(targets, completion_ids * completion_mask)
