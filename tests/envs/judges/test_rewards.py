from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
import warnings
from decimal import Decimal

import numpy as np
import pytest
import torch

from rllib_llm.envs.judges.judge_model import JudgeModel, UnreadableReply
from rllib_llm.envs.judges.reward_functions import Invalid, Judge
from rllib_llm.envs.judges.rewards import (
    RewardBatch,
    RewardError,
    RewardSum,
    RewardTerm,
    UnjudgedError,
)
from rllib_llm.shared.dotted import as_list
from rllib_llm.shared.errors import Problems, SettingWarning
from rllib_llm.shared.openai_client import ServerError
from rllib_llm.shared.remote import ExitedError, Late

NAN = float("nan")


def batch_of(*completions, prompts=None, **columns) -> RewardBatch:
    """A batch whose completion ids are the lengths of the words, one token for each word."""
    words = [completion.split() or ["-"] for completion in completions]
    longest = max(map(len, words))
    ids = torch.tensor([[len(w) for w in row] + [0] * (longest - len(row)) for row in words])
    prompts = prompts or ["p"] * len(completions)
    prompt_ids = torch.ones(len(completions), 1, dtype=torch.int64)
    return RewardBatch(
        prompt_ids, prompt_ids.bool(), ids, ids > 0, prompts, list(completions), columns
    )


def length(completions, **columns):
    return [len(completion) for completion in completions]


def count(completions, letter="a"):
    return torch.tensor([completion.count(letter) for completion in completions])


class Unlicensed:
    def __init__(self):
        raise RuntimeError("no licence")

    def __call__(self, completions):
        return [0.0 for _ in completions]


class Matches:
    """A function object with state, as a class given by dotted path."""

    def __init__(self, bonus=1.0):
        self.bonus = bonus

    def __call__(self, prompts, completions, answer):
        return np.array([self.bonus * (c == a) for c, a in zip(completions, answer, strict=True)])


@pytest.mark.parametrize("none", [None, "", {}, []])
def test_an_empty_setting_is_no_reward_function(none):
    assert as_list(none) == []


async def raises_on_bad(completions):
    if "bad" in completions:
        raise ValueError("a bad one")
    return [1.0 for _ in completions]


def slow_to_judge(completions):
    time.sleep(0.6)
    return [0.0 for _ in completions]


def test_a_time_limit_that_acts_on_nothing_is_told_once():
    rewards = RewardSum([{"function": length, "timeout_s": 1}])
    with pytest.warns(SettingWarning, match="timeout_s of .*=1 has no effect"):
        rewards(batch_of("a"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rewards(batch_of("a"))


def test_rows_that_are_asked_again_have_a_time_limit_of_their_own(monkeypatch):
    """Functions beside an async one may take longer than it may."""
    monkeypatch.setattr("rllib_llm.envs.judges.rewards._LOOP_SECONDS", 0.1)
    terms = RewardSum([{"function": raises_on_bad, "timeout_s": 0.2}, slow_to_judge])
    assert terms(batch_of("a", "b", "bad", "c")).valid.tolist() == [True, True, False, True]


def test_the_weighted_sum_and_its_components():
    rewards = RewardSum(
        [length, {"function": count, "weight": -0.5, "name": "a_count"}, f"{__name__}:Matches"]
    )
    out = rewards(batch_of("aab", "b", "cc", answer=["aab", "x", "cc"]))
    # length 3, 1, 2; minus half of the a's 2, 0, 0; plus 1 for the two right answers.
    assert out.components["length"].tolist() == [3, 1, 2]
    assert out.components["a_count"].tolist() == [2, 0, 0]  # before weighting
    assert out.components["Matches"].tolist() == [1, 0, 1]
    assert out.scores.tolist() == [3 - 1 + 1, 1, 2 + 1]
    assert out.scores.dtype == torch.float32 and out.valid.all() and out.metrics == {}


def test_kwargs_make_the_object_or_go_to_the_function():
    out = RewardSum(
        [
            {"function": f"{__name__}.Matches", "kwargs": {"bonus": 5.0}},
            {"function": count, "kwargs": {"letter": "b"}},
        ]
    )(batch_of("ab", "bb", answer=["ab", "-"], letter=["a", "a"]))
    assert out.components["Matches"].tolist() == [5, 0]
    assert out.components["count"].tolist() == [1, 2]  # kwargs stand before a column of that name


def test_columns_and_token_lists_reach_the_function():
    seen = {}

    def function(prompts, completions, completion_ids, **columns):
        seen.update(columns, prompts=prompts, ids=completion_ids)
        return [0.0] * len(prompts)

    RewardSum(function)(batch_of("aa b", "ccc", prompts=["x", "y"], label=[7, 8]))
    assert seen == {"prompts": ["x", "y"], "ids": [[2, 1], [3]], "label": [7, 8]}


@pytest.mark.parametrize("name", ["self", "function", "name", "batch", "args"])
def test_a_column_may_have_any_name(name):
    """An object that takes all columns was given its own self twice."""

    class Longest:
        def __call__(self, completions, **columns):
            return [float(len(text)) for text in completions]

    batch = RewardBatch.of_texts(["p", "p"], ["a", "bc"], {name: [1, 2]})
    assert RewardSum(Longest())(batch).scores.tolist() == [1, 2]
    given = RewardSum(lambda completions, **columns: columns[name])(batch)
    assert given.scores.tolist() == [1, 2]


def test_functions_that_want_tokens_get_tensors():
    def function(prompt_ids, prompt_mask, completion_ids, completion_mask):
        return (completion_ids * completion_mask).sum(-1)

    function.wants_tokens = True
    rewards = RewardSum(function)
    assert not rewards.wants_texts
    out = rewards(batch_of("aa b", "ccc"))
    assert out.scores.tolist() == [3, 3] and out.scores.dtype == torch.float32


def test_an_exception_costs_only_its_row():
    def fragile(completions):
        return [1 / completion.count("a") for completion in completions]

    rewards = RewardSum([fragile, length])
    with pytest.warns(UserWarning, match="'fragile' failed on .*completion 'b'") as caught:
        out = rewards(batch_of("a", "b", "aa"))
    # Others may warn meanwhile: of a socket that an earlier test left to the garbage collector.
    (ours,) = [str(one.message) for one in caught if one.category is UserWarning]
    assert "ZeroDivisionError" in ours
    assert out.valid.tolist() == [True, False, True]
    # 1/1 + 1; nothing for the failed row, though its length is known; 1/2 + 2.
    assert out.scores.tolist() == [2.0, 0.0, 2.5]
    assert out.components["fragile"].tolist() == [1.0, 0.0, 0.5]
    assert out.components["length"].tolist() == [1, 1, 2]
    assert rewards.num_failed == {"fragile": 1, "length": 0}


def test_later_failures_are_counted_without_a_warning(recwarn):
    rewards = RewardSum(lambda completions: [NAN if c == "b" else 1 for c in completions])
    for _ in range(3):
        rewards(batch_of("a", "b"))
    assert [one.category for one in recwarn].count(UserWarning) == 1
    assert rewards.num_failed == {"<lambda>": 3}


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_a_result_that_is_not_finite_is_not_valid(bad):
    rewards = RewardSum(lambda completions: [bad, 2.0])
    with pytest.warns(UserWarning, match="NaN or infinite"):
        out = rewards(batch_of("a", "b"))
    assert out.valid.tolist() == [False, True] and out.scores.tolist() == [0, 2]


def test_a_weighted_sum_that_is_not_finite_is_not_valid():
    """Each of the two is; their sum was NaN, and wiped the advantages of its group."""
    specs = [
        {"function": lambda completions: [3e38, 1.0], "name": name, "weight": weight}
        for name, weight in (("up", 10.0), ("down", -10.0))
    ]
    rewards = RewardSum(specs)(RewardBatch.of_texts(["p", "p"], ["a", "b"], {}))
    assert rewards.scores.tolist() == [0, 0] and rewards.valid.tolist() == [False, True]
    assert rewards.reasons == ("the weighted sum is NaN or infinite", "")


def test_failing_everywhere_is_an_error_with_the_first_traceback():
    def broken(completions):
        raise KeyError("no such key")

    with pytest.raises(RewardError, match=r"(?s)'broken' must judge.*no such key.*all 2.*'a'"):
        RewardSum(broken)(batch_of("a", "b"))
    with pytest.raises(RewardError, match="(?s)NaN or infinite.*all 2"):
        RewardSum(lambda completions: [NAN, NAN])(batch_of("a", "b"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], r"must have shape \[2\]: it has \[1\]"),
        ([[1.0], [2.0]], r"=.* must be 2 numbers, .*not 'list'"),
        (torch.ones(2, 1), r"must have shape \[2\].* it has \[2, 1\]"),
        (None, "='None' must be 2 numbers"),
        (1.0, "='1.0' must be 2 numbers"),
        (["12", "7"], r"must be 2 numbers, .*text is no number"),  # the completions themselves
        (["good", "bad"], "text is no number"),
        ([1.0, [None]], "must be 2 numbers"),
        (([1.0, 2.0], {"metric": [1.0]}), r"metric 'metric' of reward function 'wrong'"),
    ],
)
def test_wrong_answers_name_the_function_and_the_text(answer, message):
    def wrong(completions):
        return answer

    with pytest.raises(RewardError, match=message) as error:
        RewardSum(wrong)(batch_of("first text", "b"))
    assert "'wrong'" in str(error.value) and "first text" in str(error.value)


def test_diagnostics_are_kept_apart_from_the_score():
    def judge(completions):
        return length(completions), {"shouting": [c.isupper() for c in completions]}

    out = RewardSum(judge)(batch_of("AB", "cde"))
    assert out.scores.tolist() == [2, 3]
    assert out.metrics["shouting"].tolist() == [1.0, 0.0]
    with pytest.raises(RewardError, match="metric='shouting' must come from one"):
        RewardSum([judge, {"function": judge, "name": "again"}])(batch_of("AB", "c"))


def test_diagnostics_survive_a_failed_row():
    def judge(completions):
        if "b" in completions:
            raise ValueError("b")
        return [1.0] * len(completions), {"seen": [2.0] * len(completions)}

    with pytest.warns(UserWarning, match="failed on completions"):
        out = RewardSum(judge)(batch_of("a", "b"))
    assert out.metrics["seen"].tolist() == [2.0, 0.0]


def test_what_an_object_reports_of_itself_is_among_the_metrics():
    class Judge:
        name = "judge"

        def __call__(self, prompts, completions, **columns):
            return [1.0] * len(prompts)

        def metrics(self):
            return {"drift/rank_corr": 0.5}

    out = RewardSum(Judge())(batch_of("a", "b"))
    assert out.metrics["judge/drift/rank_corr"].tolist() == [0.5, 0.5]


def test_async_functions_run_at_the_same_time():
    waiting = 0
    together = asyncio.Event()

    async def meets(completions):
        """Returns only once both functions are under way."""
        nonlocal waiting
        waiting += 1
        if waiting == 2:
            together.set()
        await asyncio.wait_for(together.wait(), timeout=5)
        return [1.0] * len(completions)

    out = RewardSum([{"function": meets, "name": "one"}, {"function": meets, "name": "two"}])(
        batch_of("a", "b")
    )
    assert out.scores.tolist() == [2.0, 2.0]


def test_async_functions_keep_their_loop_and_lose_only_failing_rows():
    loops = set()

    class Client:
        async def __call__(self, prompts, completions, **columns):
            loops.add(asyncio.get_running_loop())
            assert threading.current_thread() is not threading.main_thread()
            if "b" in completions:
                raise ConnectionError("lost")
            return [1.0] * len(prompts)

    rewards = RewardSum(Client())
    with pytest.warns(UserWarning, match="(?s)'Client' failed on completions.*lost"):
        out = rewards(batch_of("a", "b"))
    assert out.scores.tolist() == [1.0, 0.0] and out.valid.tolist() == [True, False]
    rewards(batch_of("a", "c"))
    assert len(loops) == 1


def test_async_functions_work_below_a_running_loop():
    async def one(completions):
        return [1.0] * len(completions)

    async def notebook():
        return RewardSum(one)(batch_of("a", "b"))

    assert asyncio.run(notebook()).scores.tolist() == [1.0, 1.0]


def test_a_function_returning_an_awaitable_is_awaited():
    async def answer(completions):
        return [2.0] * len(completions)

    rewards = RewardSum([{"function": lambda completions: answer(completions), "name": "late"}])
    assert rewards(batch_of("a", "b")).scores.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "answer",
    [
        [10**400, None, 0.5],
        np.array([np.inf, None, 0.5], dtype=object),
        np.array([Invalid("no"), None, 0.5]),
        [float("nan"), None, Decimal("0.5")],
    ],
)
def test_answers_of_any_list(answer):
    other = {"function": lambda completions: [1, 1, 1], "name": "other"}
    function = {"function": lambda completions: iter(answer), "name": "odd"}
    with pytest.warns(UserWarning, match="'odd' failed on completions"):
        out = RewardSum([function, other])(batch_of("a", "b", "c"))
    assert out.valid.tolist() == [False, True, True] and out.scores.tolist() == [0, 1, 1.5]


@pytest.mark.parametrize(
    "answer", ["12", b"12", {0: 1.0, 1: 2.0}, {1.0, 2.0}, torch.tensor([1 + 2j, 1]), 1.0]
)
def test_what_is_no_list_of_numbers_is_refused(answer):
    """A mapping's keys, a set's order and a text's digits were taken for scores."""
    with pytest.raises(RewardError) as caught:
        RewardSum({"function": lambda completions: answer, "name": "odd"})(batch_of("a", "b"))
    assert caught.value.problem.name == "scores of reward function 'odd'"
    assert caught.value.problem.rule.startswith("be 2 numbers")


@pytest.mark.parametrize("is_plain", [False, True])
def test_an_answer_that_does_not_come_in_time_is_given_up_once(is_plain):
    asked, cancelled = [], threading.Event()

    async def hangs(completions):
        asked.append(list(completions))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    function = (lambda completions: hangs(completions)) if is_plain else hangs
    rewards = RewardSum([{"function": function, "name": "hangs", "timeout_s": 0.05}])
    with pytest.raises(UnjudgedError, match="no answer within timeout_s=0.05"):
        rewards(batch_of("a", "b"))
    assert asked == [["a", "b"]] and cancelled.wait(5)


def test_a_function_that_is_slow_to_end_holds_up_nobody_and_ends_in_the_background():
    ended = threading.Event()

    async def slow_to_end(completions):
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(5)
            ended.set()

    with pytest.raises(UnjudgedError, match="no answer within timeout_s=0.05"):
        RewardSum({"function": slow_to_end, "timeout_s": 0.05})(batch_of("a", "b"))
    assert not ended.is_set()  # it ends after 5.05 s
    assert ended.wait(60)


def test_functions_that_are_awaited_have_ten_minutes_and_judges_what_they_give_themselves():
    async def function(completions):
        return [0.0] * len(completions)

    class OwnJudge:
        async def __call__(self, prompts, completions, **columns):
            return [0.0] * len(completions)

    class ServerJudge(OwnJudge, Judge):
        pass

    bound = {"function": OwnJudge(), "name": "bound", "kwargs": {"a": 1}}
    functions = (function, OwnJudge, bound, ServerJudge, length)
    terms = [RewardTerm.from_spec(one) for one in functions]
    assert [term.timeout_s for term in terms] == [600.0, 600.0, 600.0, None, None]


def test_a_coroutine_function_that_blocks_its_loop_holds_up_nobody(monkeypatch):
    monkeypatch.setattr("rllib_llm.envs.judges.rewards._LOOP_SECONDS", 0.0)
    held = threading.Event()

    async def blocks(completions):
        held.wait(60)
        return [1.0] * len(completions)

    async def answers(completions):
        return [1.0] * len(completions)

    with pytest.raises(UnjudgedError, match="it blocks the event loop for longer than timeout_s"):
        RewardSum({"function": blocks, "timeout_s": 0.05})(batch_of("a", "b"))
    assert RewardSum(answers)(batch_of("a", "b")).scores.tolist() == [1.0, 1.0]
    held.set()


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            [Unlicensed],
            "'Unlicensed'={} must be .*RuntimeError: no licence, raised in test",
        ),
        ([{"function": length, "weight": NAN}], "weight of reward .*=nan must be"),
        ([{"function": length, "weight": None}], "weight of reward .*=None must be"),
        ([{"function": length, "kwargs": [1]}], r"kwargs of reward .*=\[1\] must be"),
        ([{"function": Matches, "kwargs": {"bonsu": 1}}], "unexpected keyword argument 'bonsu'"),
        ([max], "kwargs of reward function 'max'.*no signature"),
        ([{"function": length, "timeout_s": True}], "timeout_s of .*=True must be"),
        ([{"function": length, "timeout_s": float("inf")}], "timeout_s of .*=inf must be"),
        ([{"function": length, "timeout_s": 0}], "timeout_s of reward function 'length'=0 must be"),
        ([], "be one or more functions"),
        (None, "be one or more functions"),
        ([length, length], r"named \['length', 'length'\]"),
        ([{"function": length, "wieght": 2}], "wieght must be a known key. .*'weight'"),
        ([{"weight": 2}], "must have 'function'"),
        ([{"function": f"{__name__}:NAN"}], "must be a callable"),
        ([lambda texts: [0.0]], r"must take 'completions' .* it takes \['texts'\]"),
    ],
)
def test_wrong_settings(functions, message):
    with pytest.raises(RewardError, match=message):
        RewardSum(functions)


def test_a_dotted_path_that_names_nothing():
    with pytest.raises(Problems, match="rewards.functions=.*Did you mean 'length'"):
        RewardSum(f"{__name__}:lenth")


def test_columns_must_suit_the_functions():
    with pytest.raises(RewardError, match=r"'Matches' must find its arguments \['answer'\]"):
        RewardSum(Matches()).check_columns(["label"])
    with pytest.raises(RewardError, match="column='completions' must have another name"):
        RewardSum(length).check_columns(["completions"])
    RewardSum({"function": Matches(), "kwargs": {"answer": ["x"]}}).check_columns([])


def test_a_function_that_fails_everywhere_is_named_with_its_place_and_text():
    def boom(completions):
        return [1 / 0 for _ in completions]

    with pytest.raises(RewardError) as caught:
        RewardSum(boom)(batch_of("a", "b", prompts=["1+2=", "q"]))
    text = str(caught.value)
    assert "reward function 'boom'" in text and "failed on all 2" in text
    assert text.index("ZeroDivisionError") < text.index("prompt '1+2=' completion 'a'")
    assert "ZeroDivisionError: division by zero, raised in test_rewards.py:" in text
    assert "\n" not in text  # the traceback is the cause's
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_leaving_the_process_costs_rows_as_any_failure():
    def quits(completions):
        if "b" in completions:
            raise SystemExit(3)
        return [1.0] * len(completions)

    async def quits_later(completions):
        return quits(completions)

    for function in (quits, quits_later, lambda completions: quits_later(completions)):
        with pytest.warns(UserWarning, match="failed on completions.*SystemExit: 3"):
            out = RewardSum(function)(batch_of("a", "b"))
        assert out.valid.tolist() == [True, False]
        assert out.failed[next(iter(out.failed))].tolist() == [False, True]
        with pytest.raises(RewardError, match="SystemExit: 3.*all 1"):
            RewardSum(function)(batch_of("b"))


def test_none_means_not_judged_by_this_function():
    def code(completions):
        return [None, 2.0, None]

    def prose(completions):
        return [5.0, None, None]

    rewards = RewardSum([{"function": code, "weight": 0.5}, prose])
    out = rewards(batch_of("a", "b", "c"))
    # Only prose judges the first, only code the second (half of 2), nobody the third.
    assert out.scores.tolist() == [5.0, 1.0, 0.0]
    assert out.valid.tolist() == [True, True, False]
    assert out.components["code"].isnan().tolist() == [True, False, True]
    assert not any(column.any() for column in out.failed.values())
    assert rewards.num_failed == {"code": 0, "prose": 0}


def test_functions_written_for_trl_run_unchanged():
    # From TRL's documentation of GRPOTrainer, "Using a custom reward function": for standard and
    # conversational data, for some rows only, and with the trainer's state.
    def reward_func(completions, ground_truth, **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth, strict=True)]

    def math_reward_func(prompts, completions, task, **kwargs):
        assert prompts[0][-1]["role"] == "user"
        return [1.0 if t == "math" else None for t in task]

    def curriculum(completions, completion_ids, trainer_state, **kwargs):
        progress = trainer_state.global_step / trainer_state.max_steps
        return [progress * len(ids) for ids in completion_ids]

    chats = [[{"role": "user", "content": "2+2?"}], [{"role": "user", "content": "Hello"}]]
    columns = {"ground_truth": ["4", "x"], "task": ["math", "talk"], "messages": chats}
    batch = dataclasses.replace(batch_of("4", "hi you", **columns), global_step=7, max_steps=14)
    out = RewardSum([reward_func, math_reward_func, curriculum])(batch)
    assert out.components["reward_func"].tolist() == [1.0, 0.0]
    assert out.scores.tolist() == [1.0 + 1.0 + 0.5, 1.0]  # half of the run; 1 and 2 tokens


def test_who_asks_for_the_chats_gets_texts_beside_them():
    seen = []

    def ours(prompts, completions, messages):
        seen.append((prompts, completions, messages))
        return [0.0] * len(prompts)

    class Texts:
        wants_texts = True

        def __call__(self, prompts, completions, **columns):
            seen.append((prompts, completions, columns["messages"]))
            return [0.0] * len(prompts)

    chats = [[{"role": "user", "content": "hi"}]]
    RewardSum([ours, Texts()])(batch_of("yes", messages=chats))
    assert seen == [(["p"], ["yes"], chats)] * 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Late("no answer within 3 s"), "no answer within 3 s"),
        (ServerError("http://h/v1 must answer"), "http://h/v1 must answer"),
        (UnreadableReply("the judge's reply='' must"), "the judge's reply='' must"),
        (ExitedError("SystemExit: 3"), "SystemExit: 3"),
        (TimeoutError("of its own"), "TimeoutError: of its own"),
        (KeyError("a"), "KeyError: 'a'"),
    ],
)
def test_errors_of_this_package_give_their_words_as_reasons_and_others_their_class_too(
    error, reason
):
    assert Invalid.of(error) == Invalid(reason)


def test_a_judge_that_only_asks_is_no_reward_function():
    class Own(Judge):
        """Without a __call__."""

    for given in (JudgeModel, JudgeModel("http://h/v1", "m"), Own, Own(), Judge):
        with pytest.raises(RewardError, match="must score completions: "):
            RewardTerm.from_spec(given)


def test_a_late_answer_names_the_limit_and_no_class_of_ours():
    async def hangs(completions):
        await asyncio.sleep(60)

    async def some(completions):
        if "late" in completions and len(completions) == 1:
            await asyncio.sleep(60)
        if "late" in completions:
            raise KeyError("late")
        return [1.0] * len(completions)

    with pytest.raises(UnjudgedError, match="batch: no answer within timeout_s=0.05. It failed"):
        RewardSum({"function": hangs, "timeout_s": 0.05})(batch_of("late"))
    with pytest.warns(UserWarning, match="left out: no answer within timeout_s=0.05. First"):
        out = RewardSum({"function": some, "timeout_s": 0.05})(batch_of("late", "b"))
    assert out.reasons == ("some: no answer within timeout_s=0.05", "")
