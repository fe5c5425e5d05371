"""Agents that know OpenAI's interface alone: their tokens are those that were sampled for them."""

from __future__ import annotations

import asyncio
import time

import openai
import pytest
import torch

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.envs.adapters.agent import AgentEnv, open_for, run_agents
from rllib_llm.envs.check_env import check_env
from rllib_llm.envs.conversation_rollouts import EngineFailed, judge
from rllib_llm.envs.judges.rewards import UnjudgedError
from rllib_llm.examples.calculator import MODEL, build_model
from rllib_llm.rollouts.conversation_sampler import sampling_fields
from rllib_llm.serving.http_server import open_agent_server
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems

VERSION = 7
MAX_NEW_TOKENS = 6
PARAMS = SamplingParams(pad_token_id=0, max_new_tokens=MAX_NEW_TOKENS)
TASKS = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "2+2=", "answer": "4"}]


async def say(base_url, *messages, **asked):
    """What the policy says to these messages."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model="any", messages=list(messages), **asked)
    return answer.choices[0].message


def user(text):
    return {"role": "user", "content": text}


async def talk(base_url, task, num_turns=2):
    """Two turns, and 1 where the task's answer is 3."""
    messages = [user(task["prompt"])]
    for _ in range(num_turns):
        said = await say(base_url, *messages, temperature=0.2, max_tokens=999, seed=4)
        messages += [{"role": "assistant", "content": said.content}, user("1+1=")]
    return float(task["answer"] == "3")


def play(
    agent, *, kind=AgentEnv, engine=None, params=PARAMS, num_completions=2, seed=0, **changes
):
    """The attempts and the judged batch of an agent."""
    env = kind({"model": MODEL, "prompts": TASKS, "shuffle": False, "agent": agent, **changes})
    engine = engine or TorchEngine(build_model()[0], version=VERSION)
    server = open_for(env, engine, open_agent_server, (), "test")
    try:
        attempts = run_agents(
            env, env.tasks.rows(0, 2), positions=range(2), num_completions=num_completions,
            server=server, sampling=sampling_fields(params, seed), max_new_tokens=MAX_NEW_TOKENS,
        )  # fmt: skip
        return attempts, judge(env, attempts, 0)
    finally:
        env.close()


def test_the_rows_are_what_was_sampled_whatever_the_agent_asked_for():
    """Temperature, seed and length are the run's: log-probs are those of one forward pass."""
    attempts, judged = play(talk)
    batch = judged.columns
    rollouts = zip(*(batch[name].tolist() for name in
                     (columns.ROW_ID, columns.GROUP, columns.SCORES)), strict=True)  # fmt: skip
    # What a random model says may fork: a rollout then has several rows.
    assert set(rollouts) == {(0, 0, 1), (1, 0, 1), (2, 1, 0), (3, 1, 0)}
    mask = batch[columns.LOSS_MASK]
    turns = [node for a in attempts for node in a.conversation.nodes if node.sampled]
    assert len(turns) == 8 and max(len(turn.token_ids) for turn in turns) == MAX_NEW_TOKENS
    assert int(mask.sum()) == sum(len(turn.token_ids) for turn in turns)
    assert set(batch[columns.WEIGHTS_VERSION][mask].tolist()) == {VERSION}
    model = build_model()[0]
    for row in range(len(mask)):
        prompt = batch[columns.PROMPT_IDS][row][batch[columns.PROMPT_MASK][row]]
        completion = batch[columns.COMPLETION_IDS][row][batch[columns.COMPLETION_MASK][row]]
        ids = torch.cat([prompt, completion])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, completion[:, None]).squeeze(1)
        own = mask[row, : len(completion)]
        told = batch[columns.SAMPLER_LOGPROBS][row, : len(completion)]
        torch.testing.assert_close(told[own], expected[own], atol=1e-4, rtol=0)
    # Rows of a group have noise of their own.
    assert len({tuple(ids) for ids in batch[columns.COMPLETION_IDS].tolist()}) == len(mask)


def test_the_noise_is_a_function_of_seed_rollout_and_turn():
    first, again, other = (play(talk, seed=seed)[1].columns for seed in (5, 5, 6))
    ids = columns.COMPLETION_IDS
    assert torch.equal(first[ids], again[ids]) and not torch.equal(first[ids], other[ids])


def test_an_agent_that_asks_a_second_one_has_two_rows_that_weigh_as_one():
    async def run(base_url, task):
        said = await say(base_url, user(task["prompt"]))
        await say(base_url, user("9-9="))
        more = [user(task["prompt"]), {"role": "assistant", "content": said.content}, user("1*1=")]
        await say(base_url, *more)
        return {"reward": 2.0, "asked": 3}

    attempts, judged = play(run, num_completions=1)
    rows, weights = (judged.columns[name] for name in (columns.ROW_ID, columns.ROW_WEIGHT))
    assert len(rows) >= 4 and set(judged.columns[columns.SCORES].tolist()) == {2.0}
    for row_id in (0, 1):
        assert weights[rows == row_id].sum() == pytest.approx(1)
    asked = judged.metrics["asked"]
    assert asked[~asked.isnan()].tolist() == [3, 3]
    # The newest is what reward functions read: both turns of the first conversation.
    said = [message["content"] for message in attempts[0].conversation.messages]
    assert said[0] == "1+2=" and said[2] == "1*1="
    assert [m["content"] for m in attempts[0].conversation.opening] == ["1+2="]


def test_a_plain_function_with_the_plain_client_does():
    def run(base_url, task, words):
        with openai.OpenAI(base_url=base_url, api_key="none") as client:
            parts = client.chat.completions.create(model="any", messages=[user(words)], stream=True)
            return 0.5 + 0.0 * sum(len(part.choices[0].delta.content or "") for part in parts)

    _, judged = play(run, agent_kwargs={"words": "3*3="})
    assert judged.columns[columns.SCORES].tolist() == [0.5] * 4
    assert bool(judged.columns[columns.VALID].all())


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ("3", "the agent gave the reward '3', which must be a number: text is no number"),
        (float("nan"), "the agent gave the reward nan, which must be a finite number"),
        (1e39, "the agent gave the reward 1e+39, which must be a finite number of float32"),
        ({"reward": 1.0, "note": "x"}, "the agent gave the metric 'note' 'x', which must be"),
        (KeyError("answer"), "KeyError: 'answer'"),
    ],
)  # fmt: skip
def test_an_agent_that_fails_costs_only_its_rollout(result, why):
    async def run(base_url, task):
        await say(base_url, user(task["prompt"]))
        if task["answer"] == "3":
            return 1.0
        if isinstance(result, Exception):
            raise result
        return result

    with pytest.warns(UserWarning, match="2 of 4 conversations failed"):
        attempts, judged = play(run)
    assert judged.columns[columns.VALID].tolist() == [True, True, False, False]
    assert why in attempts[-1].invalid


def test_an_agent_that_samples_nothing_is_told_so():
    async def run(base_url, task):
        return 1.0

    with pytest.raises(UnjudgedError, match="agent must ask for a completion"):
        play(run)


def test_an_agent_that_hangs_is_not_valid_and_its_session_is_over():
    late = []

    async def run(base_url, task):
        await say(base_url, user(task["prompt"]))
        if task["answer"] == "4":
            try:
                await asyncio.sleep(30)
            finally:
                late.append(base_url)
        return 1.0

    start = time.monotonic()
    with pytest.warns(UserWarning, match="took longer than max_seconds=2"):
        _, judged = play(run, max_seconds=2)
    assert time.monotonic() - start < 25 and len(late) == 2
    assert judged.columns[columns.VALID].tolist() == [True, True, False, False]


def test_an_agent_in_an_endless_loop_ends_at_max_turns_and_is_judged_as_it_stands():
    """TRL #4751, with an agent's own loop."""

    async def run(base_url, task):
        return await talk(base_url, task, num_turns=100)

    attempts, judged = play(run, max_turns=2)
    assert [attempt.truncated for attempt in attempts] == ["turns"] * 4
    assert [attempt.conversation.num_turns for attempt in attempts] == [2] * 4
    assert bool(judged.columns[columns.VALID].all())
    assert set(judged.columns[columns.SCORES].tolist()) == {0.0}


def test_tokens_of_an_agent_s_conversation_are_bounded():
    attempts, _ = play(lambda url, task: talk(url, task, num_turns=100), max_tokens=40)
    assert {attempt.truncated for attempt in attempts} == {"tokens"}
    assert max(len(attempt.conversation.token_ids) for attempt in attempts) <= 40


def test_what_would_change_the_distribution_is_refused():
    async def run(base_url, task):
        asked = {"response_format": {"type": "json_object"}}
        await say(base_url, user(task["prompt"]), **asked)

    with pytest.raises(UnjudgedError, match="response_format must be text"):
        play(run)


def test_a_session_that_is_over_answers_no_more():
    kept = []

    async def run(base_url, task):
        if kept:
            with pytest.raises(openai.NotFoundError, match="is not here"):
                await say(kept[0], user("1+1="))
        await say(base_url, user(task["prompt"]))
        kept.append(base_url)
        return 1.0

    attempts, _ = play(run, num_completions=1, max_concurrent=1)
    assert [attempt.invalid for attempt in attempts] == ["", ""]


def test_an_agent_s_conversations_are_ended():
    ended = []

    class Ending(AgentEnv):
        async def end(self, conversation):
            ended.append((conversation.task["answer"], conversation.num_turns))

    play(talk, kind=Ending, num_completions=1)
    assert sorted(ended) == [("3", 2), ("4", 2)]


def test_an_engine_that_dies_is_the_runs_trouble():
    engine = TorchEngine(build_model()[0], version=VERSION)

    def step():
        raise MemoryError("no more")

    engine.step = step
    with pytest.raises(EngineFailed, match="must be open"):
        play(talk, engine=engine)


def test_what_cannot_be_called_is_refused():
    for agent in (None, lambda base_url: 1.0, 3):
        with pytest.raises(Problems, match=r"must be a function.* run\(base_url, task\)"):
            AgentEnv({"model": MODEL, "prompts": TASKS, "agent": agent})


def test_the_checker_has_the_agent_talk_to_the_model():
    asked = {"model": MODEL, "prompts": TASKS, "agent": talk}
    assert check_env("rllib_llm/Agent-v0", asked, agent_server=open_agent_server) == []
