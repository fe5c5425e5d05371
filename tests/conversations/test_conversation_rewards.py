"""What judges see of conversations, and what failures cost: the same whatever the template does."""

from __future__ import annotations

import math

import pytest

from rllib_llm.envs.conversation import ConversationEnv, Response
from rllib_llm.envs.judges.reward_functions import shown_message
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.conversations.scripted import add, roll, settings
from tests.conversations.templates import family_tokenizer
from tests.conversations.test_template_shapes import MISTRAL_V11, tokenizer_for


@pytest.fixture
def make():
    made = []

    def build(kind=ConversationEnv, **changes):
        made.append(kind(settings(**changes)))
        return made[-1]

    yield build
    for env in made:
        env.close()


class Asks(ConversationEnv):
    """Asks once more, then ends."""

    def respond(self, conversation):
        done = conversation.num_turns == 2
        return Response(() if done else "And now?", done=done)


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3"])
@pytest.mark.parametrize("history", ["fork", "keep"])
def test_judges_read_the_whole_conversation_whatever_the_template_does(make, family, history):
    seen = {}

    def texts(prompts, completions, messages):
        seen["texts"] = prompts, completions, messages
        return [1.0] * len(completions)

    def judge(prompts, completions):
        seen["judge"] = prompts, completions
        return [1.0] * len(completions)

    judge.wants_transcripts = True
    env = make(
        Asks, tokenizer=family_tokenizer(family), history=history, reward_functions=[texts, judge]
    )
    said = "<think>one</think>It is 3." if family == "qwen3" else "It is 3."
    attempts, _, _ = roll(env, said, "Still 3.", num_prompts=1, num_completions=1)
    forks = attempts[0].conversation.suffixes["fork"]
    assert forks == (family == "qwen3" and history == "fork")
    # By hand: the task, the policy's first turn, the environment's question, the last turn.
    assert seen["judge"] == (
        ["1 + 2?"],
        ["[assistant] It is 3.\n[user] And now?\n[assistant] Still 3."],
    )
    prompts, completions, messages = seen["texts"]
    assert prompts == ["[user] 1 + 2?\n[assistant] It is 3.\n[user] And now?"]
    assert completions == ["Still 3."]
    assert [m["role"] for m in messages[0]] == ["user", "assistant", "user"]


def test_a_single_answer_is_judged_as_it_is(make):
    seen = []

    def judge(prompts, completions):
        seen.append((prompts, completions))
        return [1.0] * len(completions)

    judge.wants_transcripts = True
    roll(make(reward_functions=judge), "It is 3.", num_prompts=1, num_completions=1)
    assert seen == [(["1 + 2?"], ["It is 3."])]


def test_a_call_is_shown_with_its_arguments():
    call = {"function": {"name": "add", "arguments": {"text": "1"}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert shown_message(message) == "[assistant]  add({'text': '1'})"


class Scores(ConversationEnv):
    defaults = {"worth": math.nan, "turn": None}

    def respond(self, conversation):
        return Response(done=True, reward=self.settings["turn"])

    def score(self, conversation):
        return self.settings["worth"] if conversation.task["answer"] == "3" else 1.0


@pytest.mark.parametrize("worth", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_makes_the_rollout_invalid(make, worth):
    with pytest.warns(UserWarning, match=r"score\(\) gave the reward"):
        attempts, judged, _ = roll(make(Scores, worth=worth), "Yes.")
    assert judged.columns[columns.VALID].tolist() == [False, False, True, True]
    assert judged.columns[columns.SCORES].tolist() == [0, 0, 1, 1]
    assert [bool(a.invalid) for a in attempts] == [True, True, False, False]


class Spoils(ConversationEnv):
    """Changes its own task."""

    def score(self, conversation):
        kept = conversation.task["kept"]["list"]
        kept.append(1)
        return float(len(kept))


def test_rollouts_of_a_task_have_values_of_their_own(make):
    rows = [{"prompt": "x", "kept": {"list": []}}]
    _, judged, _ = roll(make(Spoils, prompts=rows), "Yes.", num_prompts=1, num_completions=3)
    assert judged.columns[columns.SCORES].tolist() == [1, 1, 1]


def zero(completions):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>\n{"name": "add", "arguments": {"wrong": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>',
        "<tool_call>\n{oops\n</tool_call>",
    ],
)
def test_mistakes_of_the_policy_are_no_failures_of_tools(make, call):
    env = make(tools=[add], reward_functions=zero, tool_errors="invalid")
    attempts, judged, _ = roll(env, call, "Well.", num_prompts=1, num_completions=1)
    assert not attempts[0].invalid and judged.columns[columns.VALID].all()


@pytest.mark.parametrize("num_calls", [1, 2, 3])
def test_malformed_calls_are_worth_nothing_and_not_invalid_under_strict_templates(make, num_calls):
    """Mistral's template wants roles to alternate and a result for each call that it writes."""
    tokenizer = tokenizer_for(MISTRAL_V11, "</s>")
    env = make(tokenizer=tokenizer, tools=[add], reward_functions=zero)
    turns = ["[TOOL_CALLS]add[ARGS]{oops"] * num_calls + ["No."]
    attempts, judged, _ = roll(env, *turns, num_prompts=1, num_completions=1)
    assert not attempts[0].invalid and attempts[0].conversation.num_turns == num_calls + 1
    assert judged.columns[columns.VALID].all() and judged.columns[columns.SCORES].tolist() == [0.0]


def test_more_calls_than_the_template_writes_are_told_and_not_invalid(make):
    llama = family_tokenizer("llama3")
    strict = llama.chat_template.replace(
        "{% if m.tool_calls %}",
        "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('only one call at once') }}{% endif %}",
    )
    tokenizer = tokenizer_for(strict, "<|eot_id|>")
    call = '{"name": "add", "parameters": {"text": "1 + 2"}}'
    env = make(tokenizer=tokenizer, tools=[add], reward_functions=zero)
    attempts, judged, policy = roll(env, f"{call}; {call}", "3", num_prompts=1, num_completions=1)
    assert not attempts[0].invalid and judged.columns[columns.VALID].all()
    assert "make this one in your next turn" in policy.asked(0, 1)


def test_an_answer_in_json_is_no_call_without_tools(make):
    env = make(tokenizer=family_tokenizer("llama3"), reward_functions=zero)
    attempts, _, _ = roll(env, '{"name": "Ann", "age": 3}', num_prompts=1, num_completions=1)
    assert attempts[0].conversation.reply.tool_calls == ()
    assert attempts[0].conversation.reply.content == '{"name": "Ann", "age": 3}'


@pytest.mark.parametrize(
    "message",
    [{"role": 3, "content": "x"}, {"role": "user", "content": "x", "tool_calls": 3},
     {"role": "user", "content": "x", "tool_calls": [3]}],
)  # fmt: skip
def test_a_prompt_that_is_no_chat_is_refused_as_data(make, message):
    """Every conversation failed with a TypeError, and the environment was blamed."""
    with pytest.raises(Problems, match="row 0 of a list of rows.*must be text or messages"):
        make(Asks, prompts=[{"prompt": [message]}]).tasks.rows(0, 1)


def test_calls_are_shown_in_either_of_their_forms():
    """Data sets write them with and without 'function' around them; the latter was a KeyError."""
    function = {"name": "add", "arguments": {"a": 1}}
    for call in (function, {"type": "function", "function": function}):
        shown = shown_message({"role": "assistant", "content": None, "tool_calls": [call]})
        assert shown == "[assistant]  add({'a': 1})"
