"""Scores of a judge on a server: read from its replies, NaN where there is none."""

from __future__ import annotations

import asyncio

import pytest
import torch

from rllib_llm.envs.judges.llm_judges import JudgeServer, RubricJudge
from rllib_llm.envs.judges.rewards import Invalid, RewardBatch, RewardError, RewardSum
from rllib_llm.shared.errors import Problems
from tests.scripted_server import serving

QUICK = {"first_delay_s": 0.01, "max_attempts": 3, "judge_outage_s": 0}


def reply(text):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}, {}


def echo_the_answer(path, body):
    """The judge replies with what stands in the completion's place."""
    return reply(completion_of(body))


def completion_of(body):
    """Between the prompt and how the score is to be written."""
    return body["messages"][-1]["content"].partition("|")[2].partition("\n\nEnd with")[0]


def judge(server, **settings):
    return JudgeServer(server.base_url, "judge", template="{prompt}|{completion}", **QUICK,
                       **settings)  # fmt: skip


def scores(function, completions, **columns):
    return asyncio.run(function(["p"] * len(completions), completions, **columns))


def test_scores_are_the_numbers_of_the_replies():
    with serving(echo_the_answer) as server:
        answers = ["7", "Score: 3.5, I think", "none", "11", "-1", ""]
        found = scores(judge(server), answers)
    assert found[:2] == [7.0, 3.5]
    assert all(isinstance(one, Invalid) for one in found[2:])  # 11 and -1 are beyond 0 to 10
    path, body, _ = server.requests[0]
    assert path == "/v1/chat/completions"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge", 0.0, 512)


def test_columns_the_system_message_and_a_pattern_with_a_group():
    with serving(lambda path, body: reply("7/10 for style, Final: 4.")) as server:
        function = JudgeServer(
            server.base_url, "judge", template="{prompt} {completion} {answer}", system="Be fair.",
            pattern=r"Final: (\d+)", **QUICK,
        )  # fmt: skip
        assert scores(function, ["a {b}"], answer=["c"]) == [4.0]
    assert server.requests[0][1]["messages"] == [
        {"role": "system", "content": "Be fair."},
        {"role": "user", "content": "p a {b} c"},
    ]


def test_a_completion_without_an_answer_is_not_learnt_from():
    """Three attempts for "2" fail; the others are judged."""

    def answer(path, body):
        return (500, {}, {}) if completion_of(body) == "2" else reply("9")

    with serving(answer) as server:
        rewards = judged(judge(server), ["1", "2", "3"])
    assert rewards.valid.tolist() == [True, False, True]
    assert rewards.scores.tolist() == [9.0, 0.0, 9.0]
    assert len(server.requests) == 2 + 3
    # Two more attempts after the first; the same for all rows.
    assert rewards.metrics["JudgeServer/requests_retried"].tolist() == [2.0] * 3


def judged(function, completions):
    with pytest.warns(UserWarning, match="chat/completions must answer .* status 500"):
        return RewardSum(function)(rows(completions))


def rows(completions):
    count = len(completions)
    ids = torch.ones(count, 2, dtype=torch.int64)
    return RewardBatch(ids, ids.bool(), ids, ids.bool(), ["p"] * count, completions)


def test_a_judge_that_is_not_there_ends_the_run():
    with serving(echo_the_answer) as server:
        function = judge(server)
    url = f"{server.base_url}/chat/completions"
    unreachable = rf"{url} must answer .*ConnectError(.|\n)*It failed on all 2, first on "
    with pytest.raises(RewardError, match=unreachable):
        RewardSum(function)(rows(["1", "2"]))


@pytest.mark.parametrize(
    ("said", "settings", "rule"),
    [
        ("As a model I", {}, "name one score from 0 to 10"),
        ("11 of 10", {}, "name one score from 0 to 10"),
        ("Final: ten", {"pattern": r"Final: (\w+)"}, "hold a number where pattern='Final: "),
    ],
)
def test_a_judge_that_talks_nonsense_is_quoted(said, settings, rule):
    """And not asked again: it would say the same."""
    with serving(lambda path, body: reply(said)) as server:
        quoted = rf"the judge's reply='{said}' must {rule}(.|\n)*It failed on all 2"
        with pytest.raises(RewardError, match=quoted):
            RewardSum(judge(server, **settings))(rows(["1", "2"]))
    assert len(server.requests) == 2


def test_a_reply_that_is_no_score_is_not_remembered():
    replies = iter(["no", "7"])
    with serving(lambda path, body: reply(next(replies))) as server:
        function = judge(server)
        (found,) = scores(function, ["1"])
        assert "reply='no'" in found.reason
        assert scores(function, ["1"]) == scores(function, ["1"]) == [7.0]
    assert len(server.requests) == 2  # the third time it was known


def test_a_refusal_of_all_ends_the_run_with_what_the_server_said():
    with (
        serving(lambda path, body: (401, {"error": "no such key"}, {})) as server,
        pytest.raises(RewardError, match="no such key(.|\n)*It failed on all 2"),
    ):
        RewardSum(judge(server))(rows(["1", "2"]))
    assert len(server.requests) == 2


def test_bounds_the_wrong_way_round_are_said():
    with pytest.raises(ValueError, match="low=1.0 must be below high=0.0"):
        JudgeServer("http://localhost/v1", "judge", low=1.0, high=0.0)


def test_wrong_values_of_a_judge_are_told_with_its_name():
    """They were TypeErrors that named neither the judge nor its settings."""
    kwargs = {"base_url": "http://localhost/v1", "model": "x", "criteria": "a"}
    with pytest.raises(Problems, match=r"function 'RubricJudge': criteria='a' must be of"):
        RewardSum([{"function": RubricJudge, "kwargs": kwargs}])
