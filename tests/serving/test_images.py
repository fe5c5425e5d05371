"""Images in chats: read within bounds, and answered as transformers' own generate does."""

from __future__ import annotations

import base64
import io
import os

import pytest
import torch
from PIL import Image

from rllib_llm.examples import squares
from rllib_llm.modules.pretrained import load_causal_lm
from rllib_llm.modules.tokenizer import load_tokenizer
from rllib_llm.serving.engine_host import ThreadHost
from rllib_llm.serving.service import Service
from rllib_llm.serving.settings import ServeSettings
from tests.serving import tiny_server

pytestmark = pytest.mark.anyio

MODEL = "rllib_llm.examples.squares.build_model"
ROWS = squares.rows(4, seed=3)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image_part(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


def asked(*urls: str, **fields) -> dict:
    content = [*map(image_part, urls), {"type": "text", "text": squares.QUESTION}]
    return {"messages": [{"role": "user", "content": content}], **fields}


def service(source: str = MODEL, **changes) -> Service:
    settings = ServeSettings(model=source, name="sees", max_image_pixels=64**2, **changes)
    tokenizer = load_tokenizer(source)
    host = ThreadHost(load_causal_lm(source), settings, (tokenizer.eos_token_id,), tokenizer)
    return Service(host, tokenizer, settings, source=source)


def own_generate(images: list[Image.Image]) -> tuple[list[int], list[int]]:
    """Prompt and greedy completion of transformers."""
    model, processor = squares.build_model()
    parts = [*[{"type": "image"}] * len(images), {"type": "text", "text": squares.QUESTION}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True
    )
    inputs = processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0].tolist()
    length = inputs["input_ids"].shape[1]
    return out[:length], out[length:]


@pytest.mark.parametrize("num_images", [1, 2])
async def test_a_chat_with_images_is_answered_as_transformers_does(num_images, tmp_path):
    images = [row["image"] for row in ROWS[:num_images]]
    prompt, completion = own_generate(images)
    (tmp_path / "a b.png").write_bytes(png(images[0]))
    first = f"file://{tmp_path}/a%20b.png"
    urls = [first, *(data_url(png(image)) for image in images[1:])]
    async with tiny_server.asgi_client(service(allowed_local_media_path=tmp_path)) as http:
        told = await http.post("/v1/chat/completions", json=asked(
            *urls, temperature=0, max_tokens=8, return_token_ids=True, n=2,
        ))  # fmt: skip
        assert told.status_code == 200, told.text
        choices = told.json()["choices"]
        assert [choice["token_ids"] for choice in choices] == [completion] * 2
        assert choices[0]["prompt_token_ids"] == prompt
        tokens = await http.post("/tokenize", json=asked(*urls))
        assert tokens.json()["tokens"] == prompt
        # What it shows decides: the same words about another image have other log-probs.
        body = {"temperature": 0, "max_tokens": 1, "logprobs": True}
        one, other = [
            (await http.post("/v1/chat/completions", json=asked(data_url(png(image)), **body)))
            .json()["choices"][0]["logprobs"]["content"][0]["logprob"]
            for image in (ROWS[0]["image"], ROWS[1]["image"])
        ]  # fmt: skip
        assert one != other


def bomb() -> bytes:
    """A few hundred bytes of 65 x 64 pixels, one column above the bound."""
    return png(Image.new("RGB", (65, 64)))


HOSTILE = [
    ("https://example.org/cat.png", "unsupported_value"),
    ("http://169.254.169.254/latest", "unsupported_value"),
    ("cat.png", "unsupported_value"),
    ("data:image/png;base64,@@@", "invalid_value"),
    ("data:image/png,abc", "invalid_value"),
    (data_url(b"no image"), "invalid_value"),
    (data_url(png(ROWS[0]["image"])[:60]), "invalid_value"),
    (data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "invalid_value"),
    (data_url(bomb()), "image_too_large"),
    (data_url(b"0" * 3001), "image_too_large"),
    ("file:///etc/passwd", "invalid_value"),
    ("file://{folder}/../secret.png", "invalid_value"),
    ("file://{folder}/%2e%2e/secret.png", "invalid_value"),
    ("file://{folder}/link.png", "invalid_value"),
    ("file://{folder}/pipe", "invalid_value"),
    ("file://{folder}/", "invalid_value"),
    ("file://{folder}/a%00.png", "invalid_value"),
    ("file://elsewhere{folder}/good.png", "invalid_value"),
]


async def test_what_may_not_or_cannot_be_read_is_refused_by_name(tmp_path):
    folder = tmp_path / "media"
    folder.mkdir()
    good = png(ROWS[0]["image"])
    for file in (folder / "good.png", tmp_path / "secret.png"):
        file.write_bytes(good)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(folder / "pipe")
    made = service(allowed_local_media_path=folder, max_image_bytes=3000)
    async with tiny_server.asgi_client(made) as http:
        for url, code in HOSTILE:
            for route in ("/v1/chat/completions", "/tokenize"):
                told = await http.post(route, json=asked(url.replace("{folder}", str(folder))))
                assert told.status_code == 400, (url, told.text)
                error = told.json()["error"]
                assert error["param"] == "messages.0.content.0.image_url.url"
                assert error["code"] == code, (url, error)
        fine = await http.post("/tokenize", json=asked(f"file://{folder}/good.png"))
        assert fine.status_code == 200, fine.text


async def test_bounds_of_a_chat():
    url = data_url(png(ROWS[0]["image"]))
    async with tiny_server.asgi_client(service(max_images=1)) as http:
        cases = [
            ("/v1/chat/completions", asked(url, url), "messages", "too_many_images"),
            ("/v1/chat/completions", asked(url, prompt_logprobs=1), "prompt_logprobs",
             "unsupported_value"),
            ("/v1/chat/completions", asked("file:///tmp/a.png"),
             "messages.0.content.0.image_url.url", "unsupported_value"),
            ("/sessions/{}/v1/chat/completions", asked(url),
             "messages.0.content.0.image_url.url", "unsupported_value"),
        ]  # fmt: skip
        session = (await http.post("/sessions")).json()["session_id"]
        for route, body, param, code in cases:
            error = (await http.post(route.format(session), json=body)).json()["error"]
            assert (error["param"], error["code"]) == (param, code)


async def test_a_quoted_image_token_shows_nothing():
    # Its tokens would be counted as those of an image, of which there are 16.
    url, image_token = data_url(png(ROWS[0]["image"])), 3
    body = asked(url)
    body["messages"].insert(0, {"role": "system", "content": "<image><image>"})
    async with tiny_server.asgi_client(service()) as http:
        tokens = (await http.post("/tokenize", json=body)).json()["tokens"]
        assert tokens.count(image_token) == 16
        told = await http.post("/v1/chat/completions", json={**body, "max_tokens": 2})
        assert told.status_code == 200, told.text


async def test_a_model_of_text_refuses_images():
    url = data_url(png(ROWS[0]["image"]))
    made = service("tests.serving.tiny_server.build")
    async with tiny_server.asgi_client(made) as http:
        told = await http.post("/v1/chat/completions", json=asked(url))
        assert told.status_code == 400
        assert told.json()["error"]["param"] == "messages"
