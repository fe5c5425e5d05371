"""OpenAI's own client against the server: as its users call it."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
import torch

from tests.serving.tiny_server import DEADLINE_S, NAME, model, plain_logprobs

CHAT = [{"role": "user", "content": "Say something."}]
KNOBS = {"model": NAME, "seed": 3, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(tiny):
    with openai.OpenAI(base_url=f"{tiny[0]}/v1", api_key="none", timeout=DEADLINE_S) as client:
        yield client


def test_models_are_the_newest_and_each_live_version(client):
    cards = list(client.models.list())
    assert [card.id for card in cards] == [NAME, f"{NAME}@0.0"]
    assert client.models.retrieve(f"{NAME}@0.0").max_model_len == 1024
    with pytest.raises(openai.NotFoundError, match=r"must be one of \['tiny', 'tiny@0.0'\]"):
        client.models.retrieve("other")


def test_a_chat_is_the_same_whole_and_streamed(client):
    asked = {**KNOBS, "messages": CHAT, "logprobs": True, "top_logprobs": 2, "n": 2}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    for i, choice in enumerate(whole.choices):
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == i]
        assert own[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        assert [c.finish_reason for c in own if c.finish_reason] == [choice.finish_reason]
        entries = [entry for c in own for entry in c.logprobs.content]
        assert entries == choice.logprobs.content
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert whole.choices[0].message.content != whole.choices[1].message.content
    assert whole.model == f"{NAME}@0.0"
    assert whole.metadata["weight_version"] == "0.0" and whole.system_fingerprint[:3] == "fp_"


def test_the_same_seed_gives_the_same_answer_and_another_another(client):
    def say(**changes) -> str:
        made = client.chat.completions.create(**{**KNOBS, "messages": CHAT, **changes})
        return made.choices[0].message.content

    assert say() == say() != say(seed=4)
    assert say(temperature=0, seed=4) == say(temperature=0, seed=5)


def test_the_same_request_with_a_seed_has_the_same_id(client):
    def named(**changes) -> str:
        return client.chat.completions.create(**{**KNOBS, "messages": CHAT, **changes}).id

    assert named() == named() != named(seed=4)
    assert named(seed=None) != named(seed=None)


def test_raw_answers_carry_their_request_id(client):
    raw = client.chat.completions.with_raw_response.create(
        **KNOBS, messages=CHAT, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1" and raw.parse().id == "chatcmpl-mine-1"


def test_parse_reads_an_answer_by_its_schema(client):
    from pydantic import BaseModel

    class Point(BaseModel):
        x: bool
        kind: bool

    made = client.chat.completions.parse(
        **{**KNOBS, "max_tokens": 100}, messages=CHAT, response_format=Point
    )
    assert isinstance(made.choices[0].message.parsed, Point)
    assert made.choices[0].finish_reason == "stop"


def test_an_asynchronous_client_streams_many_at_once(tiny):
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{tiny[0]}/v1", api_key="none") as client:

            async def one(seed: int) -> str:
                asked = {**KNOBS, "seed": seed, "messages": CHAT}
                parts = []
                async for chunk in await client.chat.completions.create(**asked, stream=True):
                    parts += [c.delta.content or "" for c in chunk.choices]
                whole = await client.chat.completions.create(**asked)
                assert "".join(parts) == whole.choices[0].message.content
                return "".join(parts)

            texts = await asyncio.gather(*(one(seed) for seed in range(16)))
            assert len(set(texts)) > 8

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


def test_completions_take_texts_and_tokens_and_echo_them_with_log_probs(client, tiny):
    service = tiny[1]
    prompts = [[1, 40, 41, 42], [1, 50, 60]]
    made = client.completions.create(
        model=NAME, prompt=prompts, max_tokens=6, n=2, seed=1, logprobs=3, echo=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert len(made.choices) == 4
    for i, choice in enumerate(made.choices):
        prompt = prompts[i // 2]
        told = choice.logprobs
        assert choice.prompt_token_ids == prompt
        everything = [*prompt, *choice.token_ids]
        parts = zip(told.tokens, map(service.texts.of, everything), strict=True)
        assert all(name.startswith("bytes:") if "\ufffd" in text else name == text
                   for name, (text, _) in parts)  # fmt: skip
        assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
        assert told.token_logprobs[1:] == pytest.approx(
            plain_logprobs(model(), everything[:1], everything[1:]), abs=1e-4
        )
        assert len(told.text_offset) == len(everything)
        assert choice.text.startswith(service.tokenizer.decode(prompt, skip_special_tokens=True))
    scored = client.completions.create(
        model=NAME, prompt=prompts[0], max_tokens=0, logprobs=1, echo=True
    )
    expected = plain_logprobs(model(), prompts[0][:1], prompts[0][1:])
    assert scored.choices[0].logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert scored.usage.completion_tokens == 0


def test_log_probs_are_those_of_a_plain_forward_pass_of_the_tokens_that_came(client, tiny):
    made = client.chat.completions.create(
        **{**KNOBS, "max_tokens": 40}, messages=CHAT, logprobs=True, top_logprobs=5,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    choice = made.choices[0]
    told = [entry.logprob for entry in choice.logprobs.content]
    assert told == pytest.approx(
        plain_logprobs(model(), choice.prompt_token_ids, choice.token_ids), abs=1e-4
    )
    ids = torch.tensor([[*choice.prompt_token_ids, *choice.token_ids]])
    start = len(choice.prompt_token_ids)
    plain = model()(ids).logits[0, start - 1 : -1].log_softmax(-1).topk(5).values
    best = [[top.logprob for top in entry.top_logprobs] for entry in choice.logprobs.content]
    torch.testing.assert_close(torch.tensor(best), plain, atol=1e-4, rtol=0)


def test_a_client_tries_again_when_the_server_is_full(tiny):
    seen: list[int] = []

    class Counting(httpx.HTTPTransport):
        def handle_request(self, request):
            if not seen:
                seen.append(429)
                return httpx.Response(429, headers={"Retry-After": "0"}, json={"error": {}})
            answer = super().handle_request(request)
            seen.append(answer.status_code)
            return answer

    http = httpx.Client(transport=Counting())
    with openai.OpenAI(base_url=f"{tiny[0]}/v1", api_key="none", http_client=http) as client:
        made = client.chat.completions.create(**KNOBS, messages=CHAT)
    assert seen == [429, 200] and made.usage.completion_tokens > 0


def test_what_is_not_supported_is_refused_by_name(client):
    def refusal(**changes) -> openai.APIStatusError:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{**KNOBS, "messages": CHAT, **changes})
        return refused.value

    assert refusal(logit_bias={"99999": 5}).param == "logit_bias"
    assert "not supported here" in str(refusal(modalities=["audio"]))
    assert refusal(temperature=-1).param == "temperature"
    assert "temperature=-1 must be corrected" in str(refusal(temperature=-1))
    misspelt = refusal(extra_body={"max_token": 5})
    assert "no field of this request. Did you mean 'max_tokens'?" in str(misspelt)
    assert refusal(top_logprobs=3).param == "top_logprobs"
    unknown = refusal(extra_body={"colour": "red"})
    assert (unknown.param, unknown.code) == ("colour", "unknown_parameter")
    assert refusal(messages=[{"role": "king", "content": ""}]).param == "messages.0.role"
    assert refusal(max_tokens=2000).code == "context_length_exceeded"
    taken = client.chat.completions.create(
        **KNOBS, messages=CHAT, user="me", store=False, frequency_penalty=0, logit_bias={}
    )
    assert taken.choices


def test_a_batch_of_chats_is_answered_as_each_alone(client, tiny):
    chats = [CHAT, [{"role": "user", "content": "And now something longer."}], CHAT]
    asked = {**KNOBS, "logprobs": True, "return_token_ids": True}
    url = f"{tiny[0]}/v1/chat/completions"
    body = {**asked, "messages": chats}
    answer = httpx.post(f"{url}/batch", json=body, timeout=DEADLINE_S).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    alone = []
    for i, messages in enumerate(chats):  # `noise_row` names the place of the randomness
        body = {**asked, "messages": messages, "noise_row": i}
        made = httpx.post(url, json=body, timeout=DEADLINE_S).json()
        (choice,) = made["choices"]
        assert answer["choices"][i]["message"] == choice["message"]
        assert answer["choices"][i]["token_ids"] == choice["token_ids"]
        assert answer["choices"][i]["prompt_token_ids"] == choice["prompt_token_ids"]
        alone.append(made["usage"]["total_tokens"])
    assert answer["usage"]["total_tokens"] == sum(alone)
    for field, value in (("stream", True), ("n", 2), ("prompt_logprobs", 1)):
        refused = httpx.post(f"{url}/batch", json={"messages": chats, field: value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field
