"""Clients that others wrote, where they are installed: each as its own documentation uses it.

pip install instructor langchain-openai litellm
"""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.serving.tiny_server import NAME

pytestmark = pytest.mark.slow  # importing them takes a while
CHAT = [{"role": "user", "content": "1 + 1?"}]


class Sum(BaseModel):
    """The sum, and nothing else: a random model adds properties for ever."""

    model_config = ConfigDict(extra="forbid")

    a: int = Field(ge=0, le=9)
    sign: str = Field(pattern="^[+-]$")


@pytest.fixture(scope="module")
def url(tiny) -> str:
    return f"{tiny[0]}/v1"


def test_instructor_reads_objects_from_forced_calls(url):
    instructor = pytest.importorskip("instructor")
    import openai

    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"))
    made = client.chat.completions.create(
        model=NAME, messages=CHAT, response_model=Sum, max_tokens=200, seed=1, max_retries=1
    )
    assert 0 <= made.a <= 9 and made.sign in "+-"


def test_langchain_calls_functions_and_streams(url):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(model=NAME, base_url=url, api_key="none", max_tokens=200, seed=1)
    for method in ("function_calling", "json_schema"):
        made = model.with_structured_output(Sum, method=method).invoke("1 + 1?")
        assert 0 <= made.a <= 9 and made.sign in "+-"
    streamed = "".join(str(chunk.content) for chunk in model.stream("Hello"))
    assert streamed == model.invoke("Hello").content


def test_litellm_requires_a_call(url):
    litellm = pytest.importorskip("litellm")
    tools = [{"type": "function", "function": {
        "name": "add", "parameters": Sum.model_json_schema()}}]  # fmt: skip
    made = litellm.completion(
        model=f"openai/{NAME}", api_base=url, api_key="none", messages=CHAT, tools=tools,
        tool_choice="required", parallel_tool_calls=False, max_tokens=200, seed=1,
    )  # fmt: skip
    call = made.choices[0].message.tool_calls[0]
    assert call.function.name == "add" and Sum.model_validate_json(call.function.arguments)
