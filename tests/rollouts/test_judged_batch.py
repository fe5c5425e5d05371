"""Batches put together again, and groups that share a batch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rllib_llm.rollouts.errors import SampleFailure
from rllib_llm.rollouts.judged_batch import (
    JudgedBatch,
    as_bytes,
    batch_of,
    concatenate,
    judged_groups,
    opened,
)
from rllib_llm.shared import columns


def batch(prompts, completions, *, valid=None, scores=None, components=None, timing=1.0, pad=0):
    rows = len(prompts)
    prompt_ids, prompt_mask = torch.tensor(prompts), torch.tensor(prompts) > 0
    ids = torch.tensor(completions)
    scores = torch.tensor(scores or [1.0] * rows)
    return JudgedBatch(
        columns={
            columns.PROMPT_IDS: prompt_ids,
            columns.PROMPT_MASK: prompt_mask,
            columns.COMPLETION_IDS: ids,
            columns.COMPLETION_MASK: ids > 0,
            columns.SCORES: scores,
            columns.VALID: torch.tensor(valid or [True] * rows),
            columns.WEIGHTS_VERSION: torch.full(ids.shape, int(timing)).where(ids > 0, -1),
        },
        rewards=scores,
        components={name: torch.tensor(values) for name, values in (components or {}).items()},
        texts={"prompt": [f"p{row[-1]}" for row in prompts]},
        timings={"generate_seconds": timing},
        weights={"load_seconds": timing},
        pad_token_id=pad,
    )


def test_prompts_are_padded_on_the_left_and_completions_on_the_right():
    whole = concatenate([batch([[1], [2]], [[3, 4, 5], [6, 0, 0]]), batch([[0, 7, 8]], [[9]],
                                                                          timing=3.0)])  # fmt: skip
    assert whole.columns[columns.PROMPT_IDS].tolist() == [[0, 0, 1], [0, 0, 2], [0, 7, 8]]
    assert whole.columns[columns.PROMPT_MASK].int().tolist() == [[0, 0, 1], [0, 0, 1], [0, 1, 1]]
    assert whole.columns[columns.COMPLETION_IDS].tolist() == [[3, 4, 5], [6, 0, 0], [9, 0, 0]]
    assert whole.columns[columns.COMPLETION_MASK].sum(1).tolist() == [3, 1, 1]
    assert whole.texts["prompt"] == ["p1", "p2", "p8"]
    # Samplers work side by side: the slowest was waited for.
    assert whole.timings == {"generate_seconds": 3.0}
    assert whole.weights_metrics() == {"load_seconds": 3.0, "oldest_version": 1}


@pytest.mark.parametrize("name", [
    columns.SAMPLER_VALUES, columns.REF_LOGPROBS, columns.TEACHER_LOGPROBS,
])  # fmt: skip
def test_columns_that_learners_compute_are_of_all_judged_rows_or_of_none(name):
    """A run that goes on with other samplers, or another place of the reference."""
    old, new, unjudged = (batch([[1]], [[2]], valid=[valid]) for valid in (True, True, False))
    new.columns[name] = torch.ones(1, 1)
    assert name not in concatenate([old, new]).columns
    assert name not in concatenate([new, old]).columns
    assert concatenate([new, unjudged]).columns[name].tolist() == [[1.0], [0.0]]


def test_padding_is_the_pad_token_and_no_version():
    parts = [batch([[1]], [[3, 4, 5]], pad=17), batch([[7, 8]], [[9]], timing=3.0, pad=17)]
    whole = concatenate(parts)
    assert whole.columns[columns.PROMPT_IDS].tolist() == [[17, 1], [7, 8]]
    assert whole.columns[columns.COMPLETION_IDS].tolist() == [[3, 4, 5], [9, 17, 17]]
    assert whole.columns[columns.COMPLETION_MASK].int().tolist() == [[1, 1, 1], [1, 0, 0]]
    assert whole.columns[columns.WEIGHTS_VERSION].tolist() == [[1, 1, 1], [3, -1, -1]]
    assert whole.versions.tolist() == [1, 1, 1, 3]


def test_greedy_completions_of_one_prompt_count_once():
    """Two prompts, taken twice each: what is asked is whether they are answered alike."""
    ids = torch.tensor([[4, 1], [5, 1], [4, 1], [5, 1]])
    batch = JudgedBatch(
        columns={
            columns.COMPLETION_IDS: ids,
            columns.COMPLETION_MASK: torch.ones_like(ids, dtype=torch.bool),
            columns.PROMPT_INDEX: torch.tensor([0, 1, 0, 1]),
        },
        rewards=torch.zeros(4),
    )
    assert batch.distinct_share() == 0.5
    assert batch.distinct_share(is_greedy=True) == 1.0
    batch.columns[columns.COMPLETION_IDS] = torch.tensor([[4, 1]] * 4)
    assert batch.distinct_share(is_greedy=True) == 0.5  # both prompts have one answer


def test_distinct_does_not_depend_on_how_many_samplers_there_were():
    """Two samplers whose longest completions differ, and a pad token that is not 0."""
    prompts = [[1], [2], [3], [4]]
    rows = [[5, 17, 17], [6, 7, 8], [5, 17, 17], [9, 17, 17]]
    one = batch(prompts, rows, pad=17)
    two = [batch(prompts[:2], rows[:2], pad=17), batch(prompts[2:], [[5], [9]], pad=17)]
    for part in (one, *two):
        ids = part.columns[columns.COMPLETION_IDS]
        part.columns[columns.COMPLETION_MASK] = ids != 17
    # [5] comes twice among four completions: three different ones.
    assert one.env_metrics() == concatenate(two).env_metrics() == {"distinct": 0.75}
    # Also where what stands behind the end is left over from something else.
    two[1].columns[columns.COMPLETION_IDS] = torch.tensor([[5, 3], [9, 4]])
    two[1].columns[columns.COMPLETION_MASK] = torch.tensor([[True, False], [True, False]])
    two[1].columns[columns.WEIGHTS_VERSION] = torch.tensor([[1, -1], [1, -1]])
    assert concatenate(two).env_metrics() == {"distinct": 0.75}


def test_one_batch_is_itself():
    one = batch([[1]], [[2]])
    assert concatenate([one]) is one


def test_means_are_over_the_rows_that_were_judged():
    rows = batch([[1], [2], [3]], [[4], [4], [5]], valid=[True, False, True],
                 scores=[1.0, 99.0, 2.0], components={"correct": [1.0, 9.0, 0.0]})  # fmt: skip
    assert rows.train_metrics() == {"rewards": 1.5, "correct_rewards": 0.5}
    # Two different completions among three rows.
    assert rows.env_metrics() == {"distinct": pytest.approx(2 / 3)}


def test_rows_that_were_not_judged_are_in_no_mean():
    """Also where their reward is no number; and of a rollout of two rows the first one counts."""
    rows = batch([[1], [2], [2], [3]], [[4], [4], [7], [5]], valid=[False, True, True, True],
                 scores=[math.nan, 1.0, 1.0, 5.0])  # fmt: skip
    rows.columns[columns.ROW_ID] = torch.tensor([0, 1, 1, 2])
    rows.columns[columns.ROW_WEIGHT] = torch.tensor([1.0, 0.5, 0.5, 1.0])
    rows.metrics = {"num_turns": torch.tensor([9.0, 4.0, 2.0, 6.0])}
    assert rows.train_metrics() == {"rewards": 3.0}
    assert rows.env_metrics() == {"num_turns": 5.0, "distinct": 1.0}  # 4, 4 7, 5


def test_a_failure_is_text():
    try:
        raise KeyError("missing")
    except KeyError as error:
        failure = SampleFailure.from_exception(error)
    assert failure.error == "KeyError: 'missing'"
    assert "test_judged_batch.py" in failure.traceback


def raised(raise_it) -> SampleFailure:
    try:
        raise_it()
    except Exception as error:  # noqa: BLE001
        return SampleFailure.from_exception(error)


def test_what_may_pass_came_from_outside():
    def lost():
        raise ConnectionError("reset by peer")

    def lost_and_wrapped():
        try:
            lost()
        except ConnectionError as error:
            raise ValueError("no judge") from error

    def bug_while_handling_a_loss():
        try:
            lost()
        except ConnectionError:
            raise KeyError("no such retry")  # noqa: B904  (as users write)

    assert raised(lost).may_pass and raised(lost_and_wrapped).may_pass
    assert not raised(bug_while_handling_a_loss).may_pass


def test_a_metric_that_some_rows_lack_is_averaged_over_the_others():
    first, second = batch([[1], [2]], [[4], [4]], valid=[True, False]), batch([[3]], [[5]])
    first.metrics = {"length": torch.tensor([1.0, 9.0])}
    second.metrics = {"length": torch.tensor([2.0]), "latency": torch.tensor([7.0])}
    whole = concatenate([first, second])
    assert whole.metrics["latency"].isnan().tolist() == [True, True, False]
    means = whole.env_metrics()
    assert (means["length"], means["latency"]) == (1.5, 7.0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_tokens_that_were_inserted_are_never_learnt_from(order):
    """One batch has a loss mask, the other needs none, in either order."""
    plain = batch([[1]], [[5, 6, 0]])
    inserted = batch([[1]], [[5, 6, 7]])
    inserted.columns[columns.LOSS_MASK] = torch.tensor([[True, False, True]])
    parts = [plain, inserted]
    joined = concatenate([parts[i] for i in order])
    expected = [[[True, True, False], [True, False, True]][i] for i in order]
    assert joined.columns[columns.LOSS_MASK].tolist() == expected


def test_a_column_that_nothing_takes_the_place_of_is_named():
    taught = batch([[1]], [[5]])
    taught.columns["extra"] = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="must return 'extra' with all batches"):
        concatenate([batch([[1]], [[5]]), taught])


def test_single_completions_beside_conversations_earn_nothing_at_turns():
    """In either order; each of their rows is a rollout."""
    plain, talked = batch([[1]], [[5, 6]]), batch([[1]], [[5], [7]])
    talked.columns[columns.REWARDS] = torch.tensor([[1.0], [0.5]])
    talked.columns[columns.ROW_WEIGHT] = torch.tensor([0.25, 0.75])
    joined = concatenate([plain, talked]).columns
    assert joined[columns.REWARDS].tolist() == [[0.0, 0.0], [1.0, 0.0], [0.5, 0.0]]
    assert joined[columns.ROW_WEIGHT].tolist() == [1.0, 0.25, 0.75]
    assert concatenate([talked, plain]).columns[columns.ROW_WEIGHT].tolist() == [0.25, 0.75, 1.0]


def test_a_batch_that_could_not_be_judged_is_joined_with_one_that_was():
    """An evaluation of two parts: the first lacks what the judge adds, which nobody learns from."""
    lost, judged = batch([[1]], [[5, 6]], valid=[False]), batch([[1]], [[5]])
    judged.columns[columns.REF_LOGPROBS] = torch.full((1, 1), -2.0)
    for parts, expected in (
        ([lost, judged], [[0, 0], [-2, 0]]), ([judged, lost], [[-2, 0], [0, 0]]),
    ):  # fmt: skip
        joined = concatenate(parts)
        assert joined.columns[columns.REF_LOGPROBS].tolist() == expected
        assert joined.columns[columns.REF_LOGPROBS].dtype == torch.float32


def test_the_share_of_truncated_prompts_is_of_rows_whose_judge_told_it():
    lost, judged = batch([[1]], [[5]], valid=[False]), batch([[1], [2]], [[5], [6]])
    judged.metrics = {columns.PROMPT_TRUNCATED: torch.tensor([1.0, 0.0])}
    assert concatenate([lost, judged]).train_metrics()["truncated_share"] == 0.5


def test_why_nothing_could_be_judged_is_known_of_joined_batches():
    """An evaluation of two parts told of a score of 0 instead."""
    parts = [batch([[1]], [[5]], valid=[False]) for _ in range(2)]
    for part in parts:
        part.cause = "KeyError: no judge"
    assert concatenate(parts).cause == "KeyError: no judge"


# --- groups as a ledger holds them ---------------------------------------------------------------

LENGTHS = torch.tensor([3, 1, 2, 4, 2, 2])
POSITIONS = [4, 4, 5, 5, 6, 6]
VALID = torch.tensor([True, False, True, True, False, False])


def groups_of_two(replica=1, seconds=1.0):
    """Three groups: one that lost a member, a whole one, one without a score."""
    mask = torch.arange(4) < LENGTHS.unsqueeze(1)
    ones = torch.ones(6, 2, dtype=torch.int64)
    versions = torch.tensor([3, 3, 2, 3, 3, 3], dtype=torch.int32).unsqueeze(1)
    held = {
        columns.PROMPT_IDS: ones, columns.PROMPT_MASK: ones.bool(),
        columns.COMPLETION_IDS: mask.long(), columns.COMPLETION_MASK: mask,
        columns.WEIGHTS_VERSION: versions.where(mask, columns.NO_VERSION),
        columns.GROUP: torch.tensor(POSITIONS), columns.VALID: VALID,
        columns.REPLICA: torch.full((6,), replica),
    }  # fmt: skip
    return JudgedBatch(held, VALID.float(), timings={"judge_seconds": seconds}, cause="KeyError")


def test_what_is_told_of_groups_of_a_batch_is_what_is_told_of_each_alone():
    together = judged_groups(groups_of_two(), min_valid=2)
    for one in together:
        rows = opened(one.payload)
        (alone,) = judged_groups(rows, min_valid=2)
        assert dataclasses.replace(one, payload=b"") == dataclasses.replace(alone, payload=b"")
        kept = opened(as_bytes(one).payload)
        for name, column in rows.columns.items():
            assert kept.columns[name].equal(column), name
    assert [group.reason for group in together] == ["too_few", "", "unjudged"]
    assert [group.num_tokens for group in together] == [4, 6, 4]
    assert [group.num_lost for group in together] == [1, 0, 4]
    assert [group.oldest_version for group in together] == [3, 2, 3]


def test_a_whole_batch_is_handed_out_as_it_is_and_others_without_what_was_rejected():
    whole = groups_of_two()
    groups = judged_groups(whole)
    assert batch_of(groups) is whole
    assert batch_of(groups[1:]).columns[columns.GROUP].tolist() == [5, 5, 6, 6]


def test_who_spent_most_on_all_its_parts_was_waited_for():
    parts = [groups_of_two(1, 1.0), groups_of_two(2, 1.5), groups_of_two(1, 1.0)]
    groups = [group for part in parts for group in judged_groups(part)]
    assert batch_of(groups).timings == {"judge_seconds": 2.0}
