"""Conversations with another model, on a server that a test has answer."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch

from rllib_llm.envs.conversation import ChatEnv
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.conversations.scripted import ADD_CALL, add, roll, settings
from tests.scripted_server import serving


def reply(text):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}, {}


def echo(path, body):
    """The player says what it was told last, and ends what has no number."""
    said = body["messages"][-1]["content"]
    return reply(said if any(map(str.isdigit, said)) else "Bye.")


def num_messages(completions):
    return [float(len(completion)) for completion in completions]


def chat(server, client=MappingProxyType({"outage_s": 0}), **changes):
    return ChatEnv(
        settings(
            base_url=server.base_url, model_name="player", reward_functions=[num_messages],
            system_of_player="You know that it is {answer}.", last_words="Bye",
            player_settings={"max_tokens": 7},
            client_settings={"max_attempts": 2, "first_delay_s": 0.01, **client}, **changes,
        )
    )  # fmt: skip


def test_the_player_sees_the_conversation_from_its_own_side():
    with serving(echo) as server:
        env = chat(server)
        attempts, judged, _ = roll(env, "Is it 5?", "I give up.", num_prompts=1, num_completions=1)
        env.close()
    said = [(m["role"], m["content"]) for m in attempts[0].conversation.messages]
    assert said == [
        ("user", "1 + 2?"), ("assistant", "Is it 5?"), ("user", "Is it 5?"),
        ("assistant", "I give up."), ("user", "Bye."),
    ]  # fmt: skip
    assert judged.columns[columns.VALID].tolist() == [True]
    first, second = (body for _, body, _ in server.requests)
    assert (first["model"], first["max_tokens"]) == ("player", 7)
    assert first["messages"] == [
        {"role": "system", "content": "You know that it is 3."},
        {"role": "assistant", "content": "1 + 2?"},
        {"role": "user", "content": "Is it 5?"},
    ]
    assert [m["role"] for m in second["messages"][1:]] == ["assistant", "user"] * 2


def test_tools_are_the_policy_s_own():
    with serving(echo) as server:
        env = chat(server, tools=[add])
        roll(env, ADD_CALL, "It is 3.", "Enough.", num_prompts=1, num_completions=1)
        env.close()
    roles = [m["role"] for m in server.requests[0][1]["messages"]]
    assert roles == ["system", "assistant", "user"]  # neither the call nor what came of it


def test_a_player_that_does_not_answer_costs_its_rollout_and_no_other():
    def answers(path, body):
        is_first = "it is 3" in body["messages"][0]["content"]
        return (503, {"error": "overloaded"}, {}) if is_first else echo(path, body)

    with serving(answers) as server:
        env = chat(server)
        with pytest.warns(UserWarning, match="the other player did not answer"):
            _, judged, _ = roll(env, "Is it 5?", "No more.")
        env.close()
    assert judged.columns[columns.VALID].tolist() == [False, False, True, True]
    assert torch.equal(judged.columns[columns.SCORES] > 0, judged.columns[columns.VALID])


def test_a_player_that_is_away_is_waited_for():
    """A restart of the server cost all conversations, and with them the run."""
    with serving(echo, *[503] * 9) as server:
        env = chat(server, client={})
        _, judged, _ = roll(env, "Is it 5?", "No more.", num_prompts=1, num_completions=1)
        env.close()
    assert judged.columns[columns.VALID].tolist() == [True]


@pytest.mark.parametrize(
    ("client", "message"),
    [
        ({"timeout": 3}, "timeout=3 must be an argument of OpenAIClient.*Did you mean 'timeout_s'"),
        ({"timeout_s": "3"}, "timeout_s='3' must be a number"),
        ({"max_attempts": None}, "max_attempts=None must be a whole number of at least 1"),
        ({"outage_s": "long"}, "outage_s='long' must be a number of at least 0"),
        ({3: 1}, "client_settings={3: 1} must be a dictionary .* of names that are texts"),
    ],
)
def test_wrong_settings_of_the_client_are_refused_by_name(client, message):
    """They were TypeErrors."""
    address = {"base_url": "http://localhost/v1", "model_name": "player"}
    with pytest.raises(ValueError, match=message):
        ChatEnv(settings(**address, client_settings=client))


@pytest.mark.parametrize("system", ["It is {nope}.", "Say {", "Say {}.", "It is {answer.nope}."])
def test_a_system_message_that_names_no_column_is_refused_before_sampling(system):
    """Every conversation failed with "KeyError: 'nope'", and that ended the run."""
    address = {"base_url": "http://localhost/v1", "model_name": "player"}
    with pytest.raises(
        Problems, match=r"must name columns of the task .* .'answer', 'prompt'"
    ):
        ChatEnv(settings(**address, system_of_player=system))


def test_a_player_has_a_name_and_an_address():
    with pytest.raises(Problems, match="model_name"):
        ChatEnv(settings(base_url="http://localhost/v1"))
    with pytest.raises(ValueError, match="base_url='localhost' must start with http"):
        ChatEnv(settings(base_url="localhost", model_name="player"))
