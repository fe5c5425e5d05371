"""Evaluation through a server: its texts in the policy's tokens, judged like our own."""

from __future__ import annotations

import math

import pytest
import torch

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Noise, Row
from rllib_llm.engines.servers import OpenAICompletions
from rllib_llm.modules.tokenizer import load_tokenizer
from rllib_llm.rollouts.judged_batch import SampleRequest
from rllib_llm.shared.errors import Problems
from tests.algorithms import tiny_runs as tiny
from tests.engines.tiny_generations import sampled_by
from tests.envs.tiny_tokenizers import word_tokenizer
from tests.rollouts.tiny_samplers import build_sampler, judged, publication
from tests.scripted_server import serving

EOS, PAD = 1, 0  # ids of the character tokenizer
QUICK = {"first_delay_s": 0.01}
FIVE = SamplingParams(0, (2,), max_new_tokens=5)


def doubled(path, body):
    """The prompt's last three characters, ended by the model where they are digits."""
    text = load_tokenizer(tiny.MODEL).decode(body["prompt"])[-3:]
    finish = "stop" if text[0].isdigit() else "length"
    logprobs = {"token_logprobs": [-0.5] * len(text)} if finish == "stop" else None
    return 200, {"choices": [{"text": text, "finish_reason": finish, "logprobs": logprobs}]}, {}


def engine(server, **settings) -> OpenAICompletions:
    tokenizer = load_tokenizer(tiny.MODEL)
    return OpenAICompletions(
        tokenizer, base_url=server.base_url, served_model="m", **QUICK, **settings
    )


def encoded(engine, texts):
    rows = [engine.tokenizer(text)["input_ids"] for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(longest) >= longest - lengths.unsqueeze(1)


def noises(*rows: int) -> list[Noise]:
    return [Noise(9, row) for row in rows]


def params(**settings) -> SamplingParams:
    return SamplingParams(PAD, (EOS,), **{"max_new_tokens": 5, "temperature": 0.7, **settings})


def test_a_server_s_texts_are_the_policy_s_tokens():
    with serving(doubled) as server:
        ours = engine(server)
        ids, mask = encoded(ours, ["12+34=", "5=+"])
        out = sampled_by(ours, ids, mask, params(), num_completions=2, noises=noises(1, 2, 3, 4))
        ours.close()
    tokens = [row[keep].tolist() for row, keep in zip(out.completion_ids, out.completion_mask,
                                                      strict=True)]  # fmt: skip
    first, second = (ours.tokenizer(text)["input_ids"] for text in ("34=", "5=+"))
    assert tokens == [[*first, EOS]] * 2 + [[*second, EOS]] * 2
    assert out.finished.all()
    # The end's own log-prob was not given.
    assert out.logprobs[:, :3].eq(-0.5).all() and out.logprobs[:, 3].isnan().all()
    bodies = [body for _, body, _ in server.requests]
    seeds = [Noise(9, row).one_seed for row in (1, 2, 3, 4)]
    assert sorted(body["seed"] for body in bodies) == sorted(seeds)
    prompts = [ours.tokenizer(text)["input_ids"] for text in ("12+34=", "5=+")]
    assert sorted(body["prompt"] for body in bodies) == sorted([*prompts, *prompts])
    assert {(body["model"], body["max_tokens"], body["temperature"]) for body in bodies} == {
        ("m", 5, 0.7)
    }


@pytest.mark.parametrize(
    ("text", "finish", "expected", "finished"),
    [
        ("", "stop", [EOS], True),
        ("", "length", [EOS], True),  # a completion has at least one token
        ("123456789", "length", 5, False),  # more of our tokens than max_new_tokens
        ("12", "length", 2, False),
    ],
)
def test_ends_of_completions(text, finish, expected, finished):
    choice = {"text": text, "finish_reason": finish}
    with serving(lambda path, body: (200, {"choices": [choice]}, {})) as server:
        ours = engine(server)
        ids, mask = encoded(ours, ["1="])
        out = sampled_by(ours, ids, mask, params(), num_completions=1, noises=noises(0))
    tokens = out.completion_ids[0][out.completion_mask[0]].tolist()
    assert tokens == (expected if isinstance(expected, list) else
                      ours.tokenizer(text)["input_ids"][:expected])  # fmt: skip
    assert out.finished.tolist() == [finished]
    assert all(math.isnan(value) for value in out.logprobs[0].tolist())


def chat_client(server, **settings) -> OpenAICompletions:
    tokenizer = word_tokenizer(bos=True, chat=True)
    return OpenAICompletions(
        tokenizer, base_url=server.base_url, served_model="m", **QUICK, **settings
    )


def says_cat(path, body):
    return 200, {"choices": [{"text": "cat", "finish_reason": "stop"}]}, {}


def test_chat_markup_arrives_as_it_is():
    # <user> the <assistant>: special tokens, which a text would not hold.
    chat = [4, 6, 5]
    with serving(says_cat) as server:
        client = chat_client(server)
        ended = client.submit(Row(0, chat, SamplingParams(0, (2,), max_new_tokens=5))).result()
        client.close()
    assert server.requests[0][1]["prompt"] == chat
    assert (ended.token_ids, ended.versions, ended.finish) == ([8, 2], [-1, -1], "stop")


def test_prompts_travel_as_text_where_nothing_is_lost():
    settings = SamplingParams(0, (2,), max_new_tokens=5)
    with serving(says_cat) as server:
        client = chat_client(server, prompt_format="text")
        client.submit(Row(0, [1, 6, 8], settings)).result()
        with pytest.raises(ValueError, match=r"special tokens \['<user>', '<assistant>'\]"):
            client.submit(Row(0, [1, 4, 6, 5], settings))
        client.close()
        with pytest.raises(Problems) as caught:
            chat_client(server, prompt_format="messages")
        assert caught.value.problem.name == "engine_settings.prompt_format"
    assert [body["prompt"] for _, body, _ in server.requests] == ["the cat"]


def test_token_ids_of_an_answer_are_taken_as_they_are():
    choice = {"text": "?", "token_ids": [8, 9, 2], "finish_reason": "stop"}
    with serving(lambda path, body: (200, {"choices": [choice]}, {})) as server:
        client = chat_client(server)
        ended = client.submit(Row(0, [1, 6], SamplingParams(0, (2,), max_new_tokens=5))).result()
        client.close()
    assert (ended.token_ids, ended.finish) == ([8, 9, 2], "stop")


def test_greedy_is_temperature_zero():
    with serving(doubled) as server:
        ours = engine(server)
        ids, mask = encoded(ours, ["12="])
        sampled_by(ours, ids, mask, params(greedy=True), num_completions=1, noises=noises(0))
    assert server.requests[0][1]["temperature"] == 0.0


def test_an_evaluation_sampler_asks_the_server_and_needs_no_weights():
    with serving(doubled, 500, 429) as server:
        config = tiny.grpo()
        config.in_evaluation = True
        settings = {"base_url": server.base_url, "served_model": "m", **QUICK}
        config.sampling(engine="openai", engine_settings=settings)
        sampler = build_sampler(config, worker_index=1)
        batch = judged(sampler, SampleRequest(0, 2, 2, return_texts=True), publication())
        sampler.stop()
    assert sampler.module is None
    assert set(batch.versions.tolist()) == {-1}
    assert batch.texts["completion"] == [text[-3:] for text in batch.texts["prompt"]]
    assert batch.rewards.tolist() == tiny.num_digits(batch.texts["completion"])
    assert len(server.requests) == 4 + 2
