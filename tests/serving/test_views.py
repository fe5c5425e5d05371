"""Log-probs of completions: every token has a name of its own."""

from __future__ import annotations

import asyncio

from tests.serving.tiny_server import asgi_client, service


def test_tokens_that_share_a_text_are_told_apart():
    """Half of a byte vocabulary's tokens are parts of characters, whose text is one mark."""

    async def ask() -> dict:
        async with asgi_client(service()) as client:
            body = {"prompt": "aé", "max_tokens": 12, "seed": 1, "logprobs": 5, "echo": True,
                    "ignore_eos": True}  # fmt: skip
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["logprobs"]

    told = asyncio.run(ask())
    assert told["tokens"][1:4] == ["a", r"bytes:\xc3", r"bytes:\xa9"]
    places = [place for place in told["top_logprobs"] if place]
    assert len(places) == len(told["tokens"]) - 1
    assert all(len(place) == 5 for place in places)
    for token, logprob, place in zip(
        told["tokens"][1:], told["token_logprobs"][1:], places, strict=True
    ):
        assert place.get(token, logprob) == logprob
    assert any(key.startswith("bytes:") for place in places for key in place)
    assert not any("\ufffd" in key for place in places for key in place)
