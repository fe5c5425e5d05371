"""Rollouts of conversations: tools, limits, rewards, and what a failure costs."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
import time

import pytest
import torch

from rllib_llm.conversations.chat_format import ChatFormatError
from rllib_llm.envs.conversation import ConversationEnv, Response
from rllib_llm.envs.conversation_rollouts import EngineFailed, run_rollouts
from rllib_llm.envs.judges.rewards import Invalid, UnjudgedError
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.conversations.scripted import ADD_CALL, ScriptedPolicy, add, roll, settings
from tests.conversations.templates import CHATML, family_tokenizer


def right(completions, answer):
    """1 where the last message of a conversation holds the answer."""
    return [float(a in c[-1]["content"]) for c, a in zip(completions, answer, strict=True)]


@pytest.fixture
def make():
    """Makes environments that are closed in the end."""
    made = []

    def build(kind=ConversationEnv, **changes):
        made.append(kind(settings(**changes)))
        return made[-1]

    yield build
    for env in made:
        env.close()


def by_name(judged, name):
    column = judged.metrics[name]
    return column[~column.isnan()].tolist()


# --- turns, tools, rewards -----------------------------------------------------------------------


def test_a_tool_is_called_and_its_result_read(make):
    env = make(tools=[add], reward_functions=right)
    attempts, judged, policy = roll(env, ADD_CALL, "It is 3.")
    assert [a.conversation.num_turns for a in attempts] == [2] * 4
    said = policy.asked(3, 1)
    assert "<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n" in said
    # Only the first task's answer is 3.
    assert judged.columns[columns.SCORES].tolist() == [1, 1, 0, 0]
    assert judged.components["right"].tolist() == [1, 1, 0, 0]
    assert by_name(judged, "num_tool_calls") == [1] * 4
    assert judged.columns[columns.GROUP].tolist() == [0, 0, 1, 1]
    assert judged.columns[columns.ROW_ID].tolist() == [0, 1, 2, 3]


def test_the_row_is_what_the_policy_was_asked_and_said(make):
    env = make(tools=[add], reward_functions=right)
    _, judged, policy = roll(env, ADD_CALL, "It is 3.", num_prompts=1, num_completions=1)
    batch = {name: column[0] for name, column in judged.columns.items()}
    prompt = batch[columns.PROMPT_IDS][batch[columns.PROMPT_MASK]].tolist()
    completion = batch[columns.COMPLETION_IDS][batch[columns.COMPLETION_MASK]].tolist()
    (_, _, first), (_, _, second) = policy.seen
    answer = env.chat_format.encode("It is 3.<|im_end|>")
    assert prompt == first and prompt + completion == second + answer
    mask = batch[columns.LOSS_MASK][batch[columns.COMPLETION_MASK]]
    learnt = [token for token, counts in zip(completion, mask.tolist(), strict=True) if counts]
    assert learnt == env.chat_format.encode(ADD_CALL + "<|im_end|>") + answer
    assert set(batch[columns.WEIGHTS_VERSION][batch[columns.LOSS_MASK]].tolist()) == {3}


class Patient(ConversationEnv):
    """Asks again, rewards each turn, and ends after three."""

    async def respond(self, conversation):
        await asyncio.sleep(0)
        turn = conversation.num_turns
        return Response("Again.", reward=0.25 * turn, done=turn == 3, metrics={"turn": turn})

    def score(self, conversation):
        return 10.0


def test_rewards_of_turns_stand_where_they_were_earned(make):
    _, judged, _ = roll(make(Patient), "Yes.", num_completions=1)
    rewards = judged.columns[columns.REWARDS]
    assert rewards[0][rewards[0] != 0].tolist() == [0.25, 0.5, 0.75]
    mask = judged.columns[columns.LOSS_MASK][0]
    ends = mask & ~torch.cat([mask[1:], torch.tensor([False])])
    assert torch.equal(rewards[0] != 0, ends)
    assert judged.columns[columns.SCORES].tolist() == [11.5, 11.5]
    assert judged.components["turns"].tolist() == [1.5, 1.5]
    assert by_name(judged, "turn") == [3, 3]


def test_a_forked_conversation_is_counted_once(make):
    env = make(Patient, tokenizer=family_tokenizer("qwen3"))
    _, judged, _ = roll(env, "<think>\nOne.\n</think>\n\nYes.", num_prompts=1, num_completions=1)
    assert judged.columns[columns.ROW_ID].tolist() == [0, 0, 0]
    assert judged.columns[columns.ROW_WEIGHT].sum() == pytest.approx(1)
    assert by_name(judged, "num_turns") == [3] and by_name(judged, "num_forks") == [2]
    assert judged.columns[columns.SCORES].tolist() == [11.5] * 3
    said = [json.loads(messages) for messages in judged.texts["messages"]]
    assert [len(messages) for messages in said] == [2, 4, 7]  # the last words, too
    # Each row's texts are those of its tokens: what its prompt and its own turn say.
    for row, prompt in enumerate(judged.texts["prompt"]):
        ids = judged.columns[columns.PROMPT_IDS][row]
        rendered = env.tokenizer.decode(ids[judged.columns[columns.PROMPT_MASK][row]])
        assert prompt.count("[assistant]") == row == rendered.count("assistant\nYes.")
    assert judged.texts["completion"][0].count("[assistant]") == 1
    kept = make(Patient, tokenizer=family_tokenizer("qwen3"), history="keep")
    _, judged, _ = roll(kept, "<think>\nOne.\n</think>\n\nYes.", num_prompts=1, num_completions=1)
    assert judged.columns[columns.ROW_ID].tolist() == [0]


# --- limits --------------------------------------------------------------------------------------


def test_an_endless_tool_loop_ends_at_max_turns(make):
    """TRL #4751: a policy that calls tools for ever ran out of memory."""
    env = make(tools=[add], reward_functions=right, max_turns=3)
    attempts, judged, _ = roll(env, ADD_CALL)
    assert [a.truncated for a in attempts] == ["turns"] * 4
    assert by_name(judged, "num_turns") == [3] * 4
    assert bool(judged.columns[columns.VALID].all())  # it is the policy's doing, and judged


@pytest.mark.parametrize("max_turns", [1, 3])
def test_tools_of_the_last_turn_are_not_run(make, max_turns):
    """A tool's result as the last message was right for a policy that never answers."""

    env = make(tools=[add], reward_functions=right, max_turns=max_turns)
    attempts, judged, _ = roll(env, ADD_CALL)
    assert by_name(judged, "num_tool_calls") == [max_turns - 1] * 4
    assert [a.conversation.messages[-1]["role"] for a in attempts] == ["assistant"] * 4
    assert [a.truncated for a in attempts] == ["turns"] * 4


@pytest.mark.parametrize("by", ["score", "respond"])
def test_a_function_that_does_not_judge_a_row_leaves_it_to_the_others(make, by):
    """TRL sums what there is; the row was invalid."""

    class Judged(ConversationEnv):
        def score(self, conversation):
            return 2.0 if by == "score" else None

        def respond(self, conversation):
            return Response(reward=2.0 if by == "respond" else None, done=True)

    def some(completions, **columns):
        return [None, 1.0, Invalid("it is away"), None]

    def other(completions, **columns):
        return [None, None, None, 0.5]

    env = make(Judged, reward_functions=[some, other])
    with pytest.warns(UserWarning, match="it is away"):
        _, judged, _ = roll(env, "Yes.")
    assert judged.columns[columns.VALID].tolist() == [True, True, False, True]
    assert judged.columns[columns.SCORES][[0, 1, 3]].tolist() == [2.0, 3.0, 2.5]


def test_a_row_that_nothing_judges_is_invalid(make):
    def some(completions, **columns):
        return [None, 1.0, 1.0, 1.0]

    _, judged, _ = roll(make(reward_functions=some), "Yes.")
    assert judged.columns[columns.VALID].tolist() == [False, True, True, True]


def test_a_truncated_tool_call_is_never_run(make):
    ran = []

    def note(text: str) -> str:
        """Notes a text.

        Args:
            text: what.
        """
        ran.append(text)
        return "noted"

    env = make(tools=[note], reward_functions=right)
    call = '<tool_call>\n{"name": "note", "arguments": {"text": "a"}}'
    for turn in (call + "...", call + "\n</tool_call>..."):
        attempts, judged, _ = roll(env, turn)
        assert not ran and [a.truncated for a in attempts] == ["tokens"] * 4
        assert not judged.columns[columns.FINISHED].any()
    # Ended by the policy, but not closed: it is told so, and nothing is run.
    _, _, policy = roll(env, call, "Well.")
    assert not ran
    assert "Error: the call has no end: nothing closes it." in policy.asked(3, 1)


def test_tokens_of_a_conversation_are_bounded(make):
    env = make(Patient, max_tokens=60)
    attempts, judged, policy = roll(env, "Yes. " * 10)
    assert {a.truncated for a in attempts} == {"tokens"}
    exists = judged.columns[columns.COMPLETION_MASK].sum(1) + judged.columns[
        columns.PROMPT_MASK
    ].sum(1)
    assert int(exists.max()) <= 60
    with pytest.raises(
        UnjudgedError,
        match="with the first prompt of 15 tokens .* raise max_tokens above 15",
    ):
        roll(make(Patient, max_tokens=5), "Yes.")


def test_a_slow_rollout_is_not_valid_and_costs_only_itself(make):
    class Slow(Patient):
        async def respond(self, conversation):
            if conversation.task["answer"] == "3":
                await asyncio.sleep(30)
            return await super().respond(conversation)

    start = time.monotonic()
    with pytest.warns(
        UserWarning, match="2 of 4 conversations failed .* longer than max_seconds=0.5"
    ):
        _, judged, _ = roll(make(Slow, max_seconds=0.5), "Yes.")
    assert time.monotonic() - start < 20
    assert judged.columns[columns.VALID].tolist() == [False, False, True, True]
    assert judged.metrics["rollout_failed"].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    "failing", ["", "start", "respond", "score", "late", "engine", "interrupted"]
)
@pytest.mark.filterwarnings("ignore:2 of 4 conversations failed")
def test_each_conversation_is_ended_once_however_it_ends(make, failing):
    ended, answered = [], []
    main = threading.main_thread().ident

    class Ending(ConversationEnv):
        async def at(self, place, conversation):
            if conversation.task["answer"] == "3" and failing == place:
                raise OSError(f"no {place}")

        async def start(self, conversation):
            await self.at("start", conversation)
            return self.first_messages(conversation)

        async def respond(self, conversation):
            await self.at("respond", conversation)
            if conversation.task["answer"] == "3" and failing in ("late", "engine"):
                await asyncio.sleep(600)
            if failing == "interrupted":
                answered.append(conversation)
                while sys._current_frames()[main].f_code.co_name != "wait":
                    await asyncio.sleep(0.001)  # until it waits for these conversations
                if len(answered) == 2:
                    signal.pthread_kill(main, signal.SIGINT)
                await asyncio.sleep(600)
            return Response(done=True)

        async def score(self, conversation):
            await self.at("score", conversation)
            return 1.0

        async def end(self, conversation):
            await asyncio.sleep(0.01)  # not in a task that ends at once where it is cancelled
            ended.append(id(conversation))

    def say(row):
        if failing == "engine" and row == 0:
            raise EngineFailed("no tokens")
        return "Yes."

    env = make(Ending, **({"max_seconds": 0.1} if failing == "late" else {}))
    raised = {"late": UnjudgedError, "engine": EngineFailed, "interrupted": KeyboardInterrupt}
    if failing in raised:
        with pytest.raises(raised[failing]):
            roll(env, say, num_prompts=1)
        assert len({*ended}) == len(ended) == 2
        return
    attempts, judged, _ = roll(env, say)
    assert sorted(ended) == sorted(id(attempt.conversation) for attempt in attempts)
    assert judged.columns[columns.VALID].tolist() == [not failing] * 2 + [True] * 2


@pytest.mark.parametrize("end", ["fails", "is slow"])
def test_what_is_wrong_with_an_end_is_logged_and_changes_no_result(make, caplog, end):
    class Ending(Patient):
        end_seconds = 0.05

        async def end(self, conversation):
            if end == "is slow":
                await asyncio.sleep(600)
            raise OSError("not removed")

    _, judged, _ = roll(make(Ending), "Yes.")
    assert judged.columns[columns.VALID].all()
    said = "OSError: not removed" if end == "fails" else "0.05"
    assert sum(said in record.getMessage() for record in caplog.records) == 4

    def say(row):
        raise EngineFailed("no tokens")

    with pytest.raises(EngineFailed, match="no tokens"):
        roll(make(Ending), say)


def test_concurrent_rollouts_are_bounded(make):
    lock, counts = threading.Lock(), {"now": 0, "most": 0}

    class Counting(ConversationEnv):
        def respond(self, conversation):
            with lock:
                counts["now"] += 1
                counts["most"] = max(counts["most"], counts["now"])
            time.sleep(0.02)
            with lock:
                counts["now"] -= 1
            return Response(done=True, reward=1.0)

    roll(make(Counting, max_concurrent=3), "Yes.", num_completions=8)
    assert 1 < counts["most"] <= 3


# --- failures ------------------------------------------------------------------------------------


class Brittle(Patient):
    """Fails in one of the two tasks."""

    def respond(self, conversation):
        if conversation.task["answer"] == "4":
            raise SystemExit("the game is over")
        return Response(done=True, reward=1.0)


def test_a_rollout_that_dies_costs_only_itself(make):
    """AReaL #1559: what is unusable never contributes to statistics or denominators."""
    with pytest.warns(UserWarning, match="the first with SystemExit: the game is over"):
        _, judged, _ = roll(make(Brittle), "Yes.")
    assert judged.columns[columns.VALID].tolist() == [True, True, False, False]
    assert judged.columns[columns.SCORES].tolist() == [11, 11, 0, 0]
    assert by_name(judged, "turn") == [] if "turn" in judged.metrics else True
    assert len(by_name(judged, "num_turns")) == 2  # of those that are over


def test_an_environment_that_fails_always_says_so(make):
    class Broken(Patient):
        def start(self, conversation):
            raise KeyError("question")

    with pytest.raises(UnjudgedError, match="all failed, the first with KeyError: 'question'"):
        roll(make(Broken), "Yes.")


def test_a_timeout_is_never_a_score_of_zero(make):
    """miles #3221 would train on it as 0."""

    class Judge(ConversationEnv):
        def respond(self, conversation):
            late = conversation.task["answer"] == "4"
            return Response(done=True, reward=1.0, invalid="the judge timed out" if late else "")

    with pytest.warns(UserWarning, match="the judge timed out"):
        _, judged, _ = roll(make(Judge), "Yes.")
    assert judged.columns[columns.VALID].tolist() == [True, True, False, False]


def test_an_engine_that_dies_is_the_runs_trouble(make):
    env = make(Patient)

    async def complete(token_ids, room, row, turn):
        raise EngineFailed("no tokens")

    with pytest.raises(EngineFailed, match="no tokens"):
        run_rollouts(env, env.tasks.rows(0, 2), positions=range(2), num_completions=2,
                     complete=complete, max_new_tokens=9)  # fmt: skip


def test_nothing_that_says_what_a_conversation_is_worth(make):
    with pytest.raises(Problems, match="nothing judged any of these conversations"):
        roll(make(), "Yes.")


def test_respond_must_say_whether_it_is_done(make):
    class Loose(ConversationEnv):
        def respond(self, conversation):
            return "Again."

    with pytest.raises(UnjudgedError, match="TypeError: respond\\(\\) must return a Response"):
        roll(make(Loose), "Yes.")


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (Response([{"content": "no role"}]), "must return a text or messages"),
        (Response(3), "must return a text or messages"),
        (Response(done=True, metrics={"steps": "x"}), r"respond\(\) gave the metric 'steps' 'x'"),
        (Response(done=True, metrics={"steps": None}), "gave the metric 'steps' 'None'"),
        (Response(done=True, reward=1e300), "must be a finite number of float32"),
        (Response(done=True, reward=10**400), "inf, which must be a finite number"),
    ],
)
def test_what_respond_says_wrongly_costs_the_rollout_and_not_the_run(make, says, message):
    class Wrong(ConversationEnv):
        def respond(self, conversation):
            return says if conversation.task["answer"] == "3" else Response(done=True, reward=1.0)

    with pytest.warns(UserWarning, match=message):
        attempts, judged, _ = roll(make(Wrong), "Yes.")
    assert judged.columns[columns.VALID].tolist() == [False, False, True, True]


def test_last_words_may_hold_anything(make):
    class Last(ConversationEnv):
        def respond(self, conversation):
            return Response([{"role": "user", "content": {1}}], done=True, reward=1.0)

    _, judged, _ = roll(make(Last), "Yes.")
    assert json.loads(judged.texts["messages"][0])[-1] == {"role": "user", "content": "{1}"}


# --- tools that misbehave ------------------------------------------------------------------------


def tool_named_add(behave):
    def add(a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: the first.
            b: the second.
        """
        return behave()

    return add


def raises():
    raise OSError("the disk is full")


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def raises_unspeakably():
    raise Unspeakable


class Stopped(BaseException):
    """As pytest's and trio's own: no Exception."""


class RaisesInLoop:
    """A tool whose code is run in the event loop itself."""

    name, schema = "add", {"type": "function", "function": {"name": "add", "parameters": {}}}

    def __init__(self, error):
        self.error = error

    async def run(self, arguments):
        raise self.error


def test_a_template_that_refuses_the_first_prompt_is_told_before_anything_is_sampled(make):
    """Gemma's knows no system message; every rollout failed."""
    with pytest.raises(ChatFormatError, match=r"\['system', 'user'\] must be what the chat"):
        make(tokenizer=family_tokenizer("gemma"), system="Be brief.")


class RaisesInStops(Patient):
    """Raises a tool's error where it is asked whether a conversation is over, too."""

    async def stops(self, conversation, results):
        raise self.settings["tools"][0].error


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(1),
        KeyboardInterrupt(),
        GeneratorExit(),
        Stopped(),
        pytest.param(
            asyncio.CancelledError(),
            marks=pytest.mark.skipif(
                sys.version_info < (3, 11), reason="Python 3.10 does not tell who cancelled"
            ),
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_exception_ends_no_other_rollout(make, error):
    """SystemExit in the event loop's own thread ended it, and whoever waited for it hung; the
    others ended the run."""
    tool = RaisesInLoop(error)
    _, judged, policy = roll(make(tools=[tool], reward_functions=right), ADD_CALL, "It is 3.")
    assert judged.columns[columns.VALID].all()
    assert f"Error: {type(error).__name__}" in policy.asked(3, 1)
    env = make(RaisesInStops, tools=[tool])
    with pytest.warns(UserWarning, match=f"the first with {type(error).__name__}"):
        _, judged, _ = roll(env, lambda row: ADD_CALL if row == 0 else "Yes.")
    assert judged.columns[columns.VALID].tolist() == [False, True, True, True]


def note(items: list[dict]) -> str:
    """Notes things.

    Args:
        items: what.
    """
    items[0].clear()
    items.append({"more": True})
    return "noted"


NOTE = '<tool_call>\n{"name": "note", "arguments": {"items": [{"a": 1}]}}\n</tool_call>'


def test_a_tool_that_changes_its_arguments_changes_nothing_that_was_said(make):
    """The stored call, and with it every later prompt that writes it again, was another one than
    the policy's."""
    env = make(tools=[note], reward_functions=right)
    attempts, _, _ = roll(env, NOTE, "Done.", num_prompts=1, num_completions=1)
    call, result = attempts[0].conversation.messages[1:3]
    assert call["tool_calls"][0]["function"]["arguments"] == {"items": [{"a": 1}]}
    assert result["content"] == "noted"


def changes_all(completions, prompts, deep, answer):
    for chat in (*completions, *prompts):
        for message in chat:
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"].clear()
            message["content"] = "changed"
        chat.clear()
    for each in deep:
        each["list"].pop()
        each["tuple"][0].clear()
        each["set"].clear()
    return [1.0] * len(completions)


def test_a_reward_function_that_changes_what_it_is_given_changes_it_for_nobody(make):
    """The next function judged another conversation, which was stored as well; what it popped from
    a row was missing for the row's other rollouts."""
    row = {"prompt": "1 + 2?", "answer": "3"}
    seen = []

    def looks(completions, prompts, deep, **columns):
        seen.extend(zip(prompts, completions, map(str, deep), strict=True))
        return [0.0] * len(completions)

    deep = {"list": [1], "tuple": ([2],), "set": {3}}
    env = make(tools=[note], reward_functions=[changes_all, looks], prompts=[{**row, "deep": deep}])
    attempts, judged, _ = roll(env, NOTE, "Done.", num_prompts=1)
    assert judged.columns[columns.SCORES].tolist() == [1, 1]
    for attempt, (prompt, said, held) in zip(attempts, seen, strict=True):
        assert [*prompt, *said] == attempt.conversation.messages
        assert [m["content"] for m in said] == ["", "noted", "Done."]
        assert held == str({"list": [1], "tuple": ([2],), "set": {3}})
    assert deep == {"list": [1], "tuple": ([2],), "set": {3}}


def test_a_call_of_a_tool_without_a_name_is_answered_in_words(make):
    env = make(tools=[add], reward_functions=right)
    call = ADD_CALL.replace('"add"', '""')
    attempts, _, _ = roll(env, call, "Done.", num_prompts=1, num_completions=1)
    said = attempts[0].conversation.messages[2]["content"]
    assert said == "Error: the call names no tool, but an empty text."


def test_half_characters_are_no_text_anywhere(make):
    """JSON can write them, and Arrow and UTF-8 cannot: the writer of rollouts ended the run."""

    class LastWords(ConversationEnv):
        def respond(self, conversation):
            return Response("\ud83d", done=True, reward=1.0)

    env = make(LastWords, tools=[add])
    broken = ADD_CALL.replace('"b": 2', '"b": "\\ud83d", "\\ud83d": 2')
    attempts, judged, _ = roll(env, broken, ADD_CALL.replace("add", "\\ud83d"), "Yes.")
    for texts in judged.texts.values():
        "".join(texts).encode()
    assert not any(m.get("tool_calls") for m in attempts[0].conversation.messages)


def test_finite_rewards_with_an_infinite_sum_are_not_learnt_from(make):
    class Lavish(ConversationEnv):
        def respond(self, conversation):
            return Response(done=True, reward=3e38)

        def score(self, conversation):
            return 3e38 if conversation.task["answer"] == "4" else 0.0

    _, judged, _ = roll(make(Lavish), "Yes.")
    assert judged.columns[columns.VALID].tolist() == [True, True, False, False]
    assert judged.columns[columns.SCORES][2:].tolist() == [0, 0]


FAULTS = {
    "keys that JSON has not": (lambda: {(1, 2): 3}, "{(1, 2): 3}"),
    "raises unspeakably": (raises_unspeakably, "Error: Unspeakable: (its text cannot be read)"),
    "half a character": (lambda: "\ud83d 3", "? 3"),
    "hangs": (lambda: time.sleep(5), "Error: no answer within 0.2 s"),
    "raises": (raises, "Error: OSError: the disk is full"),
    "exits": (lambda: exit(3), "Error: SystemExit: 3"),
    "megabyte": (lambda: "x" * 2**20, "[1048476 characters left out]"),
    "no text": (lambda: {"n": [1, None]}, '{"n": [1, null]}'),
    "bytes": (lambda: b"\xff3", "\ufffd3"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tool_that_misbehaves_is_told_of(make, fault):
    behave, told = FAULTS[fault]
    env = make(
        tools=[tool_named_add(behave)], reward_functions=right,
        tool_timeout_s=0.2 if fault == "hangs" else 10.0,
        max_tool_chars=100,
    )  # fmt: skip
    start = time.monotonic()
    attempts, judged, policy = roll(env, ADD_CALL, "It is 3.")
    assert time.monotonic() - start < 4
    results = [m["content"] for m in attempts[0].conversation.messages if m["role"] == "tool"]
    assert told in results[0] and len(results[0]) < 200
    assert bool(judged.columns[columns.VALID].all())
    is_failure = fault in ("hangs", "raises", "raises unspeakably", "exits")
    assert by_name(judged, "tool_failures") == [float(is_failure)] * 4


def test_failures_of_tools_may_make_a_rollout_invalid(make):
    env = make(tools=[tool_named_add(raises)], reward_functions=right, tool_errors="invalid")
    with pytest.warns(UserWarning, match="tool 'add': Error: OSError: the disk is full"):
        _, judged, _ = roll(env, lambda row: ADD_CALL if row == 0 else "It is 3.")
    assert judged.columns[columns.VALID].tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ('{"name": "add", "arguments": {"a": 1}}', "'b' is a required property"),
        ('{"name": "add", "arguments": {"a": "x", "b": 2}}', "'x' is not of type 'integer'"),
        ('{"name": "sub", "arguments": {}}', "there is no tool 'sub', but ['add']"),
        ("{", "the call is not valid JSON"),
    ],
)
def test_wrong_calls_are_told_of(make, call, told):
    env = make(tools=[add], reward_functions=right)
    attempts, _, _ = roll(env, f"<tool_call>{call}</tool_call>", "It is 3.")
    # A call that could not be read is none to the template, and its answer no tool's.
    result = attempts[0].conversation.messages[2]
    assert result["role"] == ("user" if call == "{" else "tool") and told in result["content"]


def test_a_tool_knows_which_conversation_called_it(make):
    """TRL #4866: tools could not tell which completion called them."""

    class Counter(ConversationEnv):
        def start(self, conversation):
            conversation.state["calls"] = 0
            return super().start(conversation)

        def tools_of(self, conversation):
            def count(step: int) -> int:
                """Counts.

                Args:
                    step: how far.
                """
                conversation.state["calls"] += step
                return conversation.state["calls"]

            return [count]

        def tools(self):
            return self.tools_of(None)

        def score(self, conversation):
            return float(conversation.state["calls"])

    call = '<tool_call>{"name": "count", "arguments": {"step": 2}}</tool_call>'
    _, judged, _ = roll(make(Counter), call, lambda row: call if row % 2 else "Done.", "Done.")
    assert judged.columns[columns.SCORES].tolist() == [2, 4, 2, 4]


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_turns": 0}, "env_config.max_turns=0 must be a whole number of at least 1"),
        ({"max_tokens": 1.5}, "env_config.max_tokens=1.5 must be a whole number"),
        ({"tool_errors": "ignore"}, "env_config.tool_errors='ignore' must be"),
        ({"max_turn": 3}, "max_turn must be a known key. Did you mean 'max_turns'"),
        ({"prompts": None}, "prompts must have data: there is nothing"),
        ({"template_settings": {1: 2}}, "{1: 2} must be a dictionary .*of names that are texts"),
        ({"template_settings": {"tools": []}}, r"variables of the chat template alone: .'tools'."),
        ({"template_settings": {"tokenize": True}}, "must hold variables of the chat template"),
    ],
)
def test_settings_are_checked(make, changes, message):
    with pytest.raises(Problems, match=message):
        make(**changes)


def test_a_template_that_forgets_tools_is_refused(make):
    tokenizer = family_tokenizer("chatml")
    changed = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>", pad_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML.replace("{{ t | tojson }}", ""),
    )  # fmt: skip
    with pytest.raises(ChatFormatError, match=r"it does not name \['add'\]"):
        make(tokenizer=changed, tools=[add])
    assert ScriptedPolicy  # the policy of all tests here


@pytest.mark.parametrize("name", ["image", "images"])
def test_images_are_not_silently_left_out_of_conversations(make, name):
    tasks = [{"prompt": "What is 1 + 2?", "answer": "3", name: None},
             {"prompt": "What is this?", "answer": "4", name: "cat.png"}]  # fmt: skip
    env = make(prompts=tasks, shuffle=False)
    with pytest.raises(Problems) as error:
        roll(env, "It is 3.")
    assert error.value.problem.name.endswith("image")
    with pytest.raises(Problems) as error:
        make(prompts=tasks[::-1], shuffle=False)
    assert error.value.problem.name.endswith("image")
