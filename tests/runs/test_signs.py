from __future__ import annotations

import math
import random

import pytest

from rllib_llm.runs.signs import RULES, Watch, kept, latest_signs, signs


def rows(**columns: list[float]) -> list[dict]:
    """One result per iteration from a list of values by name, "a__b" for "a/b"."""
    named = {key.replace("__", "/"): values for key, values in columns.items()}
    num = max(map(len, named.values()))
    return [
        {"training_iteration": i + 1, **{k: v[i] for k, v in named.items() if i < len(v)}}
        for i in range(num)
    ]


def found(results: list[dict]) -> list[tuple[str, int]]:
    return [(sign.name, sign.iteration) for sign in signs(results)]


def test_constant_rewards_are_seen_after_three_iterations():
    results = rows(objective__scores=[1.0] * 5, objective__scores_std=[0.2, 0, 0, 0, 0])
    assert found(results) == [("constant rewards", 4)]
    assert "the same reward, 1," in signs(results)[0].text
    # A zero for each completion is constant, too; a small spread is none.
    assert found(rows(objective__scores=[0] * 3, objective__scores_std=[0] * 3)) != []
    assert found(rows(objective__scores=[0] * 3, objective__scores_std=[1e-3] * 3)) == []


def test_flat_groups_are_seen_where_prompts_differ():
    groups = [1.0, 0.9, 1.0, 1.0, 1.0]
    flat = {"train__zero_variance_groups": groups, "objective__scores": [0.5] * 5}
    assert found(rows(**flat, objective__scores_std=[0.5] * 5)) == [("flat groups", 5)]
    # One reward for all is told as that.
    names = [name for name, _ in found(rows(**flat, objective__scores_std=[0.0] * 5))]
    assert names == ["constant rewards"]


def test_conversations_that_call_no_tool_are_seen():
    results = rows(env__num_tool_calls=[0.1, 0.0, 0.0, 0.0, 0.0])
    assert found(results) == [("no tool calls", 4)]
    assert found(rows(env__num_tool_calls=[0.0, 0.0, 0.1, 0.0, 0.0])) == []


def test_a_judge_that_learns_by_heart_is_seen():
    losses = {"loss__reward_model": [0.7, 0.6, 0.5, 0.4, 0.3]}
    # Evaluations after iterations 0, 2 and 4, each reported until the next.
    worse = {"eval__loss": [0.69, 0.69, 0.75, 0.75, 0.8], "eval__iteration": [0, 0, 2, 2, 4]}
    assert found(rows(**losses, **worse)) == [("overfitted judge", 5)]
    text = signs(rows(**losses, **worse))[0].text
    assert "0.800" in text and f"{math.log(2):.3f}" in text and "0.700 to 0.300" in text
    better = {**worse, "eval__loss": [0.69, 0.69, 0.6, 0.6, 0.5]}
    assert found(rows(**losses, **better)) == []
    late = {**worse, "eval__loss": [0.69, 0.69, 0.8, 0.8, 0.75]}  # it falls, from above a coin's
    assert found(rows(**losses, **late)) == []
    untrained = {"loss__reward_model": [0.7] * 5}  # a coin before it has learnt is no sign
    assert found(rows(**untrained, **worse)) == []


@pytest.mark.parametrize(
    ("entropy", "expected"),
    [
        ([2.0, 1.0, 0.05, 0.04, 0.03], [("entropy collapse", 5)]),
        ([2.0, 1.5, 1.2, 1.0, 0.9], []),  # it learns
        ([0.3, 0.08, 0.08, 0.08, 0.08], []),  # more than a tenth of what it was
        ([0.05, 0.001, 0.001, 0.001], []),  # it never had any
    ],
)
def test_an_entropy_collapse_is_seen(entropy: list[float], expected: list):
    assert found(rows(policy__entropy_avg=entropy)) == expected


def test_a_kl_explosion_is_counted_per_token():
    length = [10.0] * 4
    assert found(rows(objective__kl=[1, 25, 30, 40], train__output_length=length)) == [
        ("KL explosion", 4)
    ]
    assert found(rows(objective__kl=[1, 15, 15, 15], train__output_length=length)) == []
    assert found(rows(train__output_length=length)) == []  # without a reference


def test_the_newest_result_shows_its_signs_and_only_what_rules_read_is_kept():
    results = rows(objective__scores=[1.0] * 3, objective__scores_std=[0.0] * 3)
    assert [sign.name for sign in latest_signs(results)] == ["constant rewards"]
    assert latest_signs(results[:2]) == [] and latest_signs([]) == []
    config = {"config/num_learners": 2}
    assert kept({**results[0], **config, "config/model": "m"}) == {**results[0], **config}
    assert len(RULES) == 9


def test_a_trial_without_cores_is_told():
    (sign,) = signs(rows(time_share__starved=[0.1, 0.5, 0.6, 0.4]))
    assert (sign.name, sign.iteration) == ("starved", 4)
    assert "40% of the time" in sign.text
    assert signs(rows(time_share__starved=[0.1, 0.5, 0.2, 0.5])) == []


def test_want_of_cores_is_told_of_long_runs_and_names_only_samplers_that_are_there():
    starved = {"time_share__starved": [0.5] * 3}
    assert signs(rows(**starved, time_this_iter_s=[1.0] * 3)) == []
    (sign,) = signs(rows(**starved, time_this_iter_s=[20.0] * 3))
    assert "num_env_runners" not in sign.text and "OMP_NUM_THREADS" in sign.text
    two = {"config__num_env_runners": [2] * 3, "config__num_learners": [0] * 3}
    (sign,) = signs(rows(**starved, **two, time_this_iter_s=[20.0] * 3))
    assert "lower num_env_runners" in sign.text and "num_learners" not in sign.text


def test_each_drop_of_a_batch_is_explained_by_what_differs():
    scores = [0.5, 0.52, 0.48, 0.5, 0.53, 0.5, 0.1, 0.5, 0.1]
    drops = signs(
        rows(
            objective__scores=scores,
            train__right_rewards=[0.4] * 6 + [0.0, 0.4, 0.4],
            train__brief_rewards=[0.1] * 9,
            train__output_length=[20.0] * 6 + [9.0, 20.0, 20.0],
            val__finished=[0.9] * 8 + [0.5],
        )
    )
    assert [(sign.name, sign.iteration) for sign in drops] == [
        ("reward drop", 7),
        ("reward drop", 9),
    ]
    assert "from 0.5, the median before, to 0.1" in drops[0].text
    assert "mostly right, 0.4 to 0" in drops[0].text and "9 tokens (20)" in drops[0].text
    assert "50% of the completions were cut off (10%)" in drops[1].text


def test_a_drop_within_the_chance_of_a_batch_is_none():
    scores = {"objective__scores": [5.0] * 8 + [4.5], "episode": [16.0 * i for i in range(1, 10)]}
    # Four standard errors of 16 completions: 0.7 / 4 * 4 = 0.7, and 0.4 / 4 * 4 = 0.4.
    assert found(rows(**scores, objective__scores_std=[0.7] * 9)) == []
    told = found(rows(**scores, objective__scores_std=[0.4] * 9))
    assert told == [("reward drop", 9)]
    # Of a rare reward: one in 16, whose deviation is 0.25, and then none, which deviates by 0.
    rare = {"objective__scores": [1 / 16] * 8 + [0.0], "episode": scores["episode"]}
    assert found(rows(**rare, objective__scores_std=[0.25] * 8 + [0.0])) == []


def test_a_slow_iteration_that_had_no_cores_is_told():
    slow = {"time_this_iter_s": [3.0, 4.0, 3.0, 112.0], "time_share__starved": [0.0, 0.0, 0.0, 0.8]}
    (sign,) = signs(rows(**slow))
    assert (sign.name, sign.iteration) == ("slow iteration", 4)
    assert "112 s" in sign.text and "is 3 s" in sign.text and "80% of the time" in sign.text
    assert signs(rows(**{**slow, "time_share__starved": [0.0] * 4})) == []  # it had them
    assert signs(rows(**{**slow, "time_this_iter_s": [3.0, 4.0, 3.0, 8.0]})) == []


def test_a_watch_that_forgets_sees_what_all_rows_together_show():
    rng = random.Random(0)
    for _ in range(60):
        length, interval = rng.randint(5, 90), rng.randint(1, 40)
        falls = rng.randint(1, length)  # where the policy collapses
        results = rows(
            loss__reward_model=[0.7 - 0.6 * i / length for i in range(length)],
            eval__loss=[0.69 + 0.01 * (i // interval) for i in range(length)],
            eval__iteration=[interval * (i // interval) for i in range(length)],
            policy__entropy_avg=[2.0 if i < falls else 0.01 for i in range(length)],
            objective__kl=[rng.choice([1.0, 500.0]) for _ in range(length)],
            train__output_length=[10.0] * length,
            objective__scores=[1.0] * length,
            objective__scores_std=[rng.choice([0.0, 0.0, 1.0]) for _ in range(length)],
        )
        of_all, seen = [], set()
        for end in range(1, length + 1):
            new = [sign for sign in latest_signs(results[:end]) if sign.name not in seen]
            seen |= {sign.name for sign in new}
            of_all += new
        assert signs(results) == of_all


def test_a_watch_keeps_no_more_rows_the_longer_it_lasts():
    watch = Watch()
    sizes = []
    for i in range(200):
        watch.new_signs({"training_iteration": i, "policy/entropy_avg": 1.0, "eval/iteration": i})
        sizes.append(sum(len(part) for part in (watch._first, watch._evaluations, watch._last)))
    assert sizes[-1] == sizes[50]
