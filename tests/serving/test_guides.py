"""Answers that keep to a schema, checked by another library's validator."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import re

import jsonschema
import pytest
from llguidance import LLMatcher

from rllib_llm.serving.guides import Grammars
from tests.serving.tiny_server import DEADLINE_S, EOS, NAME, asgi_client, service, tokenizer

CHAT = [{"role": "user", "content": "Say something."}]
SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
     "additionalProperties": False},
    {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 2, "maxItems": 4},
    {"type": "object", "properties": {"k": {"const": "x"}, "n": {"type": "integer", "minimum": 3,
     "maximum": 12}}, "required": ["k", "n"], "additionalProperties": False},
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[ab]{2,3}$"}]},
    {"$defs": {"leaf": {"type": "string", "maxLength": 3}}, "type": "object",
     "properties": {"p": {"$ref": "#/$defs/leaf"}}, "required": ["p"],
     "additionalProperties": False},
]  # fmt: skip


def drawn_schema(draw: random.Random, depth: int = 2) -> dict:
    """A schema of nested objects, arrays, unions and bounded values."""
    kinds = ["boolean", "null", "integer", "string", "pattern", "enum"]
    kind = draw.choice(["object", "array", "union", *kinds] if depth else kinds)
    inner = functools.partial(drawn_schema, draw, depth - 1)
    if kind == "object":
        names = draw.sample("abcdé", draw.randint(1, 3))
        return {"type": "object", "properties": {name: inner() for name in names},
                "required": names, "additionalProperties": False}  # fmt: skip
    if kind == "array":
        least = draw.randint(0, 2)
        return {"type": "array", "items": inner(), "minItems": least, "maxItems": least + 1}
    if kind == "union":
        return {"anyOf": [inner(), inner()]}
    least = draw.randint(-20, 20)
    others = {
        "integer": {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 99)},
        "string": {"type": "string", "minLength": 1, "maxLength": draw.randint(1, 4)},
        "pattern": {"type": "string", "pattern": draw.choice(["^[ab]{1,3}$", "^x[0-9]+y?z$"])},
        "enum": {"enum": draw.sample(["red", "é€", 3, -1.5, None, True, "a b"], 3)},
    }
    return others.get(kind, {"type": kind})


def ask_all(bodies: list[dict]) -> list:
    async def run() -> list:
        async with asgi_client(service()) as http:
            return await asyncio.gather(
                *(http.post("/v1/chat/completions", json={"model": NAME, **b}) for b in bodies)
            )

    return asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def schema_format(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


def test_the_first_tokens_are_found_once_and_where_grammars_are_compiled():
    """Some expressions take long for them, during which the engine would stand still."""
    the_tokenizer = tokenizer()
    grammars = Grammars(the_tokenizer, EOS)
    grammar = LLMatcher.grammar_from_regex("(ab){2}")
    grammars.compile(grammar, 0).result()
    one, other = grammars.guide(grammar), grammars.guide(grammar)
    assert one.allowed() is other.allowed()
    a, b = the_tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert one.allowed().nonzero().flatten().tolist() == [a]
    one.take(a)
    assert one.allowed().nonzero().flatten().tolist() == [b]
    assert other.allowed().nonzero().flatten().tolist() == [a]
    grammars.close()


def test_expressions_that_grow_while_they_are_followed_are_refused():
    grown = "|".join(f"((a{{1000}}){{{1000 + i}}})" for i in range(300))
    (answer,) = ask_all([
        {"messages": CHAT, "max_tokens": 5, "response_format": {"type": "regex", "regex": grown}}
    ])  # fmt: skip
    assert answer.status_code == 400
    assert "too many expressions" in answer.json()["error"]["message"]


def test_answers_are_valid_by_their_schemas_at_any_temperature():
    draw = random.Random(0)
    bodies = [
        {"messages": CHAT, "seed": seed, "temperature": temperature, "max_tokens": 300,
         "response_format": schema_format(schema), "logprobs": True}
        for schema in [*SCHEMAS, *(drawn_schema(draw) for _ in range(20))]
        for seed, temperature in enumerate((0, 1, 1.5))
    ]  # fmt: skip
    for body, answer in zip(bodies, ask_all(bodies), strict=True):
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "stop"  # a random model's white space is bounded, too
        schema = body["response_format"]["json_schema"]["schema"]
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)


def test_objects_expressions_and_grammars():
    formats = [
        {"type": "regex", "regex": "[0-9]{3}-[ab]"},
        {"type": "grammar", "grammar": 'start: "yes" | "no" "!"'},
        {"type": "json_object"},
    ]
    bodies = [{"messages": CHAT, "max_tokens": 300, "response_format": f} for f in formats]
    expression, grammar, _ = (a.json()["choices"][0]["message"] for a in ask_all(bodies))
    assert re.fullmatch("[0-9]{3}-[ab]", expression["content"])
    assert grammar["content"] in ("yes", "no!")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (schema_format({"type": "objekt"}), "response_format.json_schema.schema"),
        ({"type": "json_schema"}, "response_format.json_schema.schema"),
        ({"type": "regex", "regex": "("}, "response_format.regex"),
        ({"type": "grammar", "grammar": "begin: x"}, "response_format.grammar"),
        ({"type": "xml"}, "response_format.type"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(wrong, field):
    (answer,) = ask_all([{"messages": CHAT, "response_format": wrong}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
