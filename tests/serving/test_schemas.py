"""Wrong fields of requests: the answer names the place and what may stand there."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rllib_llm.serving.schemas import (
    ChatRequest,
    CompletionRequest,
    ResponseRequest,
    field_error,
)

SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
TEXT = {"type": "text", "text": "What is this?"}


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("model", "body", "name", "told"),
    [
        (ChatRequest, user([TEXT, SOUND]), "messages.0.content.1.type", "'input_audio' must"),
        (ChatRequest, user([{"type": "image_url", "image_url": {}}]),
         "messages.0.content.0.image_url.url", "must be given"),
        (ChatRequest, user([{"type": "text"}]), "messages.0.content.0.text", "must be given"),
        (ChatRequest, user([{**TEXT, "detail": 1}]), "messages.0.content.0.detail", "no field"),
        (ChatRequest, user(5), "messages.0.content", "=5 must"),
        (ChatRequest, user("a") | {"tool_choice": {"type": "function", "function": {}}},
         "tool_choice.function.name", "must be given"),
        (ChatRequest, user("a") | {"stop": ["b", 1]}, "stop.1", "=1 must"),
        (ChatRequest, user("a") | {"str": 1}, "str", "is no field"),
        (CompletionRequest, {"prompt": ["a", 1]}, "prompt.1", "valid string"),
        (CompletionRequest, {"prompt": [[1, "a"]]}, "prompt.0.1", "valid integer"),
        (CompletionRequest, {"prompt": 5}, "prompt", "=5 must"),
        (ResponseRequest, {"input": [{"type": "function_call", "name": "f", "call_id": "1"}]},
         "input.0.arguments", "must be given"),
        (ResponseRequest, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input.0.content.0.type", "'input_image' must"),
    ],
)  # fmt: skip
def test_the_wrong_part_of_a_request_is_named(model, body, name, told):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    errors = [each | {"loc": ("body", *each["loc"])} for each in caught.value.errors()]
    error = field_error(errors, "json", "")
    assert error.param == name
    assert told in error.message
