"""Task sets of verifiers 0.4 as they are, in this process."""

from __future__ import annotations

import asyncio
import json
import re
import time

import pytest

from rllib_llm.conversations.chat_format import ChatFormatError
from rllib_llm.shared import columns
from tests.conversations.scripted import roll, settings
from tests.conversations.templates import family_tokenizer

pytest.importorskip("verifiers", reason="verifiers pins openai below 3: see the guide")

from rllib_llm.conversations.conversation import Conversation  # noqa: E402
from rllib_llm.envs.adapters.verifiers import (  # noqa: E402
    VerifiersEnv,
    new_trace,
    write_nodes,
)
from rllib_llm.shared.errors import Problems
from tests.serving import tiny_server  # noqa: E402

HERE = "tests.conversations.vf_sums"


def call(a, b):
    return f'<tool_call>{{"name": "sums_add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


@pytest.fixture
def make():
    made = []

    def build(**changes):
        given = {k: v for k, v in settings().items() if k != "prompts"}
        made.append(VerifiersEnv({**given, "taskset": f"{HERE}:Sums", **changes}))
        return made[-1]

    yield build
    for env in made:
        env.close()


def test_prompts_tools_rewards_and_metrics_are_the_task_set_s(make):
    env = make()
    attempts, judged, policy = roll(env, call(1, 1), "2")
    asked = policy.asked()
    assert "Add.<|im_end|>" in asked and "1+1?<|im_end|>" in asked and '"sums_add"' in asked
    schema = env.toolbox.tools["sums_add"].schema["function"]
    assert schema["description"] == "Adds two numbers."
    assert schema["parameters"]["required"] == ["a", "b"]
    results = [m["content"] for m in attempts[0].conversation.messages if m["role"] == "tool"]
    assert results == ["2 (1+1?)"]
    # 2 * right + a quarter for the call; the second task's answer is 3.
    assert judged.columns[columns.SCORES].tolist() == [2.25, 2.25, 0.25, 0.25]
    additions = judged.metrics["additions"]
    assert additions.tolist() == [1, 1, 1, 1]  # each conversation has a toolset of its own


def test_stops_end_a_loop_of_calls(make):
    attempts, judged, _ = roll(make(), call(1, 1))
    assert [attempt.conversation.num_turns for attempt in attempts] == [3] * 4
    assert judged.columns[columns.SCORES].tolist() == [0.75] * 4
    assert bool(judged.columns[columns.VALID].all())


def test_the_record_has_the_sampled_tokens(make):
    attempts, _, _ = roll(make(), call(1, 1), "2", num_prompts=1, num_completions=1)
    (attempt,) = attempts
    trace = attempt.conversation.state["trace"]
    sampled = [node for node in trace.nodes if node.sampled]
    turns = [node for node in attempt.conversation.nodes if node.sampled]
    assert [node.token_ids for node in sampled] == [list(turn.token_ids) for turn in turns]
    assert [node.message.role for node in trace.nodes] == [
        "system", "user", "assistant", "tool", "assistant"
    ]  # fmt: skip
    assert trace.num_turns == 2 and not trace.is_truncated and trace.last_reply == "2"


def test_turns_before_a_fork_are_in_the_record(make):
    """The template drops old thoughts, and so each further turn begins a row of its own."""
    env = make(tokenizer=family_tokenizer("qwen3"))
    conversation, trace = Conversation(env.chat_format), new_trace(env.vf_tasks[0])
    for turn in range(3):
        conversation.append_messages([{"role": "user", "content": f"Question {turn}"}])
        ids = env.chat_format.encode("<think>\nOne.\n</think>\n\nYes." + env.chat_format.turn_end)
        conversation.append_sampled(ids, [-0.5] * len(ids))
    assert conversation.suffixes["fork"] == 2
    for _ in range(2):  # it is written anew for each stop
        write_nodes(trace, conversation)
    assert trace.num_turns == 3 and trace.num_branches == 1
    assert [node.message.role for node in trace.nodes] == ["user", "assistant"] * 3
    assert [len(node.token_ids) for node in trace.nodes if node.sampled] == [len(ids)] * 3
    read = [len(node.token_ids) for node in conversation.nodes if not node.sampled]
    assert [call.usage.prompt_tokens for call in trace.calls] == read


def plain_call(name, **arguments):
    given = json.dumps(arguments)
    return f'<tool_call>{{"name": "{name}", "arguments": {given}}}</tool_call>'


def test_a_shared_toolset_has_a_state_of_each_rollout(make):
    """After verifiers' scratchpad: 16 rollouts at once, each reads its own word alone."""
    env = make(taskset=f"{HERE}:Scratchpads")
    words = ("alpha", "bravo", "charlie", "delta")
    attempts, judged, _ = roll(
        env, lambda row: plain_call("scratchpad_roundtrip", word=words[row // 4]),
        plain_call("scratchpad_shout"), lambda row: words[row // 4],
        num_prompts=4, num_completions=4,
    )  # fmt: skip
    assert judged.columns[columns.SCORES].tolist() == [2.0] * 16
    said = (attempt.conversation.messages for attempt in attempts)
    told = [[m["content"] for m in messages if m["role"] == "tool"] for messages in said]
    assert told == [[word, word.upper()] for word in words for _ in range(4)]
    for attempt, outputs, total in zip(
        attempts, judged.metrics["output_tokens"], judged.metrics["total_tokens"], strict=True
    ):
        turns = [node for node in attempt.conversation.nodes if node.sampled]
        assert outputs == sum(len(turn.token_ids) for turn in turns)
        assert total == len(attempt.conversation.token_ids)


def test_toolsets_of_one_state_share_it(make):
    both = plain_call("ones_one") + plain_call("hundreds_hundred")
    env = make(taskset=f"{HERE}:Counts")
    _, judged, _ = roll(env, both, "Done.", num_prompts=1)
    assert judged.columns[columns.SCORES].tolist() == [101.0] * 2
    assert judged.metrics["completed"].tolist() == [1.0] * 2
    env = make(taskset=f"{HERE}:Counts", max_turns=3)
    _, judged, _ = roll(env, both, num_prompts=1)
    assert judged.columns[columns.SCORES].tolist() == [303.0] * 2
    assert judged.metrics["was_cut"].tolist() == [1.0] * 2


def test_reverse_text_is_worth_what_verifiers_says(make):
    """Scores of verifiers 0.4's own harness (null, in a subprocess) for the same replies."""
    texts = ("hello world", "Ein Satz, mit Komma.", "abcabcabc")

    def say(row):
        return f"<reversed_text>\n{texts[row % 3][::-1][:5]} and more\n</reversed_text> bye"

    env = make(taskset=f"{HERE}:Reverse")
    attempts, judged, _ = roll(env, say, num_prompts=3, num_completions=1)
    scores = judged.columns[columns.SCORES].tolist()
    assert scores == pytest.approx([0.64, 0.47058823529411764, 0.5217391304347826])
    traces = [attempt.conversation.state["trace"] for attempt in attempts]
    assert [(t.stop_condition, t.num_turns) for t in traces] == [("agent_completed", 1)] * 3


def test_a_prompt_of_several_messages_is_in_the_record_as_it_was_given(make):
    env = make(taskset=f"{HERE}:Reverse")
    attempts, _, policy = roll(env, "x", num_prompts=4, num_completions=1)
    nodes = attempts[-1].conversation.state["trace"].nodes
    assert [node.message.role for node in nodes] == ["user", "assistant", "tool", "assistant"]
    assert [node.sampled for node in nodes] == [False, False, False, True]
    assert [call.arguments for call in nodes[1].message.tool_calls] == ['{"a": 1}']
    assert "None" not in policy.asked(3)


def test_settings_of_the_task_set_and_how_many_tasks(make):
    assert len(make(taskset_config={"most": 5}).tasks) == 5
    assert len(make(taskset_config={"most": 5}, num_tasks=3).tasks) == 3
    assert len(make(taskset=f"{HERE}:Endless", num_tasks=4).tasks) == 4


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("model", {"point": {"x": 1}}, "3"),
        ("model", {"point": '{"x": 1, "y": 4}'}, "5"),
        ("year", {"day": "2020-01-02", "plus": "1"}, "2021"),
        ("year", {"day": "2020-01-02", "other": 1}, "2020"),
        ("pair", {}, "a\nb"),
        ("point", {}, '{\n  "x": 1,\n  "y": 2\n}'),
        ("year", {"day": "soon"}, "Error: arguments of 'year': ValidationError: 1 valid.* date"),
    ],
)
def test_calls_are_read_and_results_written_as_by_verifiers(make, name, arguments, text):
    """As by the server of a toolset and the harness `null`. A model or a date came as JSON, and a
    list went back as JSON."""
    env = make(
        taskset=f"{HERE}:Kits", reward_functions=lambda completions: [1.0], tool_errors="invalid"
    )
    attempts, judged, _ = roll(
        env, plain_call(name, **arguments), "Done.", num_prompts=1, num_completions=1
    )
    (result,) = (m["content"] for m in attempts[0].conversation.messages if m["role"] == "tool")
    assert re.match(text, result, re.DOTALL) if text.startswith("Error") else result == text
    assert judged.columns[columns.VALID].tolist() == [True]  # a wrong call is the policy's doing


def test_a_template_without_system_messages_is_refused_before_anything_is_sampled(make):
    with pytest.raises(ChatFormatError, match=r"\['system', 'user'\] must be what the chat"):
        make(taskset=f"{HERE}:Systems", tokenizer=family_tokenizer("gemma"))


def test_tasks_that_nothing_rewards_are_refused(make):
    """They were worth 0 each."""
    with pytest.raises(
        Problems, match="nothing judged any of these conversations"
    ):
        roll(make(taskset=f"{HERE}:Kits"), "Done.", num_prompts=1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"taskset": f"{HERE}:Boxed"}, "it runs in a container"),
        ({"taskset": f"{HERE}:Running"}, r"\['ran'\] want a runtime"),
        ({"taskset": f"{HERE}:Skilled"}, "skills are installed by verifiers' harnesses"),
        ({"taskset": f"{HERE}:Keyed"}, r"\['runtime_env'\] want a runtime"),
        ({"taskset": f"{HERE}:Endless"}, "num_tasks=None must be a number: its tasks never end"),
        ({"taskset": f"{HERE}:Guarded"}, r"@vf.intercept of \['guard'\] rewrites"),
        ({"taskset": f"{HERE}:Watched"}, r"@vf.stop of \['long'\] looks at requests or resp"),
        ({"taskset": f"{HERE}:Remote"}, "toolset Ones must be .* http://localhost:1/mcp"),
        (
            {"taskset": f"{HERE}:Mixed"},
            "must have the same tools in all tasks.*'CountTask': .'hundreds",
        ),
        ({"taskset": f"{HERE}:Dynamics"}, r"toolset Dynamic must be .*register\(\) offers tools"),
        ({"taskset": f"{HERE}:Raising"}, "taskset=.* must yield tasks: KeyError: 'row', raised in"),
        ({"taskset": "no_such_taskset"}, "taskset='no_such_taskset'.* must be a vf.Taskset"),
        ({"taskset_config": {"mots": 3}}, "with the settings taskset_config={'mots': 3}: "),
    ],
)
def test_what_cannot_be_done_in_this_process_is_refused(make, changes, why):
    with pytest.raises(Problems, match=why):
        make(**changes)


def test_verifiers_own_client_for_training_samples_from_the_server(tmp_path):
    """As it asks after a bridged turn; the seed's tokens are the server's own."""
    import httpx
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    tiny_server.tokenizer().save_pretrained(tmp_path)
    knobs = {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "seed": 5, "max_tokens": 6}
    sampling = SamplingConfig(**knobs, reasoning_effort="low", routed_experts_prompt_start=3)
    body = {"model": tiny_server.NAME, "messages": [{"role": "user", "content": "1 + 1?"}]}

    async def ask(address):
        config = TrainClientConfig(base_url=f"{address}/v1", renderer_model_name=str(tmp_path))
        client = TrainClient(config)
        try:
            return await client.get_response(ChatDialect(), body, sampling, session_id="one")
        finally:
            await client.close()

    with tiny_server.running(tiny_server.service()) as address:
        told = asyncio.run(ask(address))
        sent = {"token_ids": told.tokens.prompt_ids, "sampling_params": {**knobs, "logprobs": 1}}
        sent["sampling_params"]["stop_token_ids"] = [tiny_server.EOS]
        (own,) = httpx.post(f"{address}/inference/v1/generate", json=sent).json()["choices"]
    assert told.tokens.completion_ids == own["token_ids"] and told.finish_reason == "length"
    assert told.tokens.completion_logprobs == [
        each["logprob"] for each in own["logprobs"]["content"]
    ]


def test_a_rollout_starts_no_process_and_costs_milliseconds(make):
    """verifiers' own default harness starts a process for each."""
    import psutil

    env, before = make(), len(psutil.Process().children(recursive=True))
    start = time.process_time()
    roll(env, call(1, 1), "2", num_completions=50)
    seconds = time.process_time() - start
    assert len(psutil.Process().children(recursive=True)) == before
    assert seconds / 100 < 0.1  # ten times what it takes
