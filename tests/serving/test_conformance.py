"""What other people's clients send, and read of the answers."""

from __future__ import annotations

import asyncio
import json

import httpx
import jsonschema
import openai
import pytest

from rllib_llm.serving.completions import EventStream
from rllib_llm.serving.http_server import HttpServer
from rllib_llm.serving.schemas import ApiError
from rllib_llm.serving.settings import ServeSettings
from rllib_llm.shared.errors import Problems
from tests.serving.tiny_server import DEADLINE_S, NAME, asgi_client, service, tokenizer

CHAT = [{"role": "user", "content": "1 + 1?"}]
ASKED = {"model": NAME, "messages": CHAT, "seed": 1, "max_tokens": 200}
PROPERTIES = {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "op": {"enum": ["+", "-"]}}
PARAMETERS = {
    "type": "object", "properties": PROPERTIES, "required": ["a", "op"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "look", "parameters": {
        "type": "object", "properties": {}, "additionalProperties": False}}},
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def client(tiny):
    with openai.OpenAI(base_url=f"{tiny[0]}/v1", api_key="none", timeout=DEADLINE_S) as client:
        yield client


def post(tiny, path: str, **body) -> httpx.Response:
    return httpx.post(f"{tiny[0]}{path}", json=body, timeout=DEADLINE_S)


# --- calls that have to be made ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_named_tool_is_called_by_its_schema(client, seed):
    asked = {**ASKED, "seed": seed, "tools": TOOLS, "tool_choice": NAMED}
    choice = client.chat.completions.create(**asked).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "add")
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"a", "op"} and arguments["op"] in "+-" and 0 <= arguments["a"] <= 9


def test_required_calls_one_of_the_tools(client):
    for seed in range(6):
        asked = {**ASKED, "seed": seed, "tools": TOOLS, "tool_choice": "required"}
        choice = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
        (call,) = choice.message.tool_calls
        assert call.function.name in ("add", "look") and choice.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "syntax",
    ["<|python_tag|>", "[TOOL_CALLS]", "<function=", "", "<tool_call>", "<arg_key>",
     "<|channel|>", "<|tool_call>", "<|tool_call_start|>", "<|START_ACTION|>",
     "[TOOL_CALLS][ARGS]"],
    ids=["llama3", "mistral", "xml", "none", "hermes", "glm", "harmony", "gemma4", "pythonic",
         "cohere", "named mistral"],
)  # fmt: skip
def test_calls_are_forced_in_each_syntax(syntax):
    template = (
        "{% if tools %}SYNTAX{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    ).replace("SYNTAX", syntax)

    async def ask() -> None:
        async with asgi_client(service(the_tokenizer=tokenizer(template))) as http:
            for stream in (False, True):
                body = {**ASKED, "tools": TOOLS, "tool_choice": NAMED, "stream": stream}
                answer = await http.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                if stream:
                    lines = answer.text.split("\n\n")
                    told = [json.loads(each[6:]) for each in lines if each.startswith("data: {")]
                    choice = told[-1]["choices"][0]
                    message = choice["delta"]
                else:
                    choice = answer.json()["choices"][0]
                    message = choice["message"]
                (call,) = message["tool_calls"]
                assert choice["finish_reason"] == "tool_calls"
                assert set(json.loads(call["function"]["arguments"])) == {"a", "op"}

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


LEAF = {"type": "object", "properties": {"v": {"enum": [1, 2]}}, "required": ["v"],
        "additionalProperties": False}  # fmt: skip
REFERRING = {
    "$defs": {"leaf": LEAF}, "type": "object", "properties": {"p": {"$ref": "#/$defs/leaf"}},
    "required": ["p"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize("syntax", [
    "<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<function=", "<arg_key>", "<|channel|>",
    "<|tool_call>", "<|tool_call_start|>", "<|START_ACTION|>",
])  # fmt: skip
def test_parameters_may_refer_to_their_own_definitions(syntax):
    """As pydantic writes nested models: they were looked for at the root of the call."""
    template = (
        "{% if tools %}SYNTAX{% endif %}{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    )
    tool = {"type": "function", "function": {"name": "add", "parameters": REFERRING}}

    async def ask() -> None:
        the_tokenizer = tokenizer(template.replace("SYNTAX", syntax))
        async with asgi_client(service(the_tokenizer=the_tokenizer)) as http:
            body = {**ASKED, "tools": [tool], "tool_choice": NAMED}
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
            told = json.loads(call["function"]["arguments"])
            assert set(told) == {"p"} and told["p"]["v"] in (1, 2)

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


@pytest.mark.parametrize("nothing", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_function_without_parameters_is_called_without_arguments(client, nothing):
    """As OpenAI reads them; a random model wrote some until its tokens were used up."""
    tools = [{"type": "function", "function": {"name": "add", **nothing}}]
    choice = client.chat.completions.create(**ASKED, tools=tools, tool_choice=NAMED).choices[0]
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {}


@pytest.mark.slow
def test_parameters_may_refer_to_themselves(client):
    """`#` is the parameters' root, not the call's."""
    schema = {"type": "object", "properties": {"v": {"const": 1}, "next": {"$ref": "#"}},
              "required": ["v"], "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    depths = []
    for seed in range(12):
        if any(depths) and len(depths) > 2:
            break
        asked = {**ASKED, "seed": seed, "tools": tools, "tool_choice": NAMED, "max_tokens": 400}
        choice = client.chat.completions.create(**asked).choices[0]
        if choice.finish_reason == "tool_calls":
            (call,) = choice.message.tool_calls
            arguments = json.loads(call.function.arguments)
            jsonschema.validate(arguments, schema)
            depths.append("next" in arguments)
    assert any(depths)


def test_a_tool_that_is_not_there_is_refused(client):
    with pytest.raises(openai.BadRequestError) as refused:
        other = {"type": "function", "function": {"name": "other"}}
        client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=other)
    assert refused.value.param == "tool_choice"


def test_no_two_calls_have_the_same_id(client):
    # Whoever traces a conversation sends the same id with each of its requests.
    asked = {**ASKED, "tools": TOOLS, "tool_choice": NAMED, "n": 3,
             "extra_headers": {"X-Request-Id": "a-conversation"}}  # fmt: skip
    ids = [
        choice.message.tool_calls[0].id
        for _ in range(2)
        for choice in client.chat.completions.create(**asked).choices
    ]
    assert len(set(ids)) == 6
    assert all(len(each) == 9 and each.isalnum() for each in ids), "as Mistral's templates want"


# --- vLLM's fields -------------------------------------------------------------------------------


def test_what_changes_nothing_of_tokens_is_taken(tiny):
    """As verifiers' TrainClient sends it."""
    plain = {"token_ids": [1, 40, 41], "sampling_params": {"max_tokens": 4, "seed": 1}}
    sent = {
        "token_ids": [1, 40, 41],
        "sampling_params": {**plain["sampling_params"], "skip_special_tokens": False,
                            "spaces_between_special_tokens": False, "logprobs": 1,
                            "reasoning_effort": "low", "routed_experts_prompt_start": 0},
    }  # fmt: skip
    answer = post(tiny, "/inference/v1/generate", **sent)
    assert answer.status_code == 200, answer.text
    expected = post(tiny, "/inference/v1/generate", **plain).json()["choices"][0]["token_ids"]
    assert answer.json()["choices"][0]["token_ids"] == expected


def test_a_token_s_logprob_is_its_entry_among_the_likeliest(client):
    made = client.chat.completions.create(**{**ASKED, "max_tokens": 40, "temperature": 0},
                                          logprobs=True, top_logprobs=3)  # fmt: skip
    for each in made.choices[0].logprobs.content:
        assert each.logprob == each.top_logprobs[0].logprob


def test_penalties_bias_and_min_p_reach_the_sampler(tiny):
    def tokens(**changes) -> list[int]:
        body = {"model": NAME, "prompt": [1, 40, 41], "max_tokens": 12, "seed": 3,
                "ignore_eos": True, "return_token_ids": True, **changes}  # fmt: skip
        answer = post(tiny, "/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    assert set(tokens(logit_bias={"70": 100})) == {70}
    assert len(set(tokens(logit_bias={"70": 100, "71": 99}, frequency_penalty=2))) == 2
    greedy = tokens(temperature=0)
    assert tokens(min_p=1.0) == greedy
    assert tokens(temperature=0, repetition_penalty=50.0) != greedy
    assert 70 not in tokens(logit_bias={"70": -100}, presence_penalty=1.0)
    assert tokens(temperature=5e-324) == greedy
    unfinite = {"model": NAME, "prompt": [1, 40, 41], "repetition_penalty": 5e-324}
    refused = post(tiny, "/v1/completions", **unfinite)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "repetition_penalty")


def test_prompts_are_scored_and_echoed_whole_and_in_streams(tiny):
    body = {"model": NAME, "prompt": [1, 40, 41], "max_tokens": 3, "seed": 1, "logprobs": 2}
    whole = post(tiny, "/v1/completions", **body, echo=True, prompt_logprobs=1).json()["choices"][0]
    places = whole["prompt_logprobs"]
    assert places[0] is None and "40" in places[1] and places[2]["41"]["rank"] >= 1
    assert places[1]["40"]["logprob"] == whole["logprobs"]["token_logprobs"][1]
    streamed = post(tiny, "/v1/completions", **body, echo=True, stream=True)
    chunks = [json.loads(each[6:]) for each in streamed.text.split("\n\n")
              if each.startswith("data: {")]  # fmt: skip
    assert "".join(each["choices"][0]["text"] for each in chunks) == whole["text"]
    logprobs = [value for each in chunks
                for value in each["choices"][0]["logprobs"]["token_logprobs"]]  # fmt: skip
    assert logprobs == whole["logprobs"]["token_logprobs"]
    chat = post(tiny, "/v1/chat/completions", **{**ASKED, "max_tokens": 1}, prompt_logprobs=0)
    assert chat.json()["prompt_logprobs"][0] is None
    tokens = {"token_ids": [1, 40], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
    assert len(post(tiny, "/inference/v1/generate", **tokens).json()["prompt_logprobs"]) == 2


def test_scores_of_a_prompt_are_refused_in_a_stream(tiny):
    """They were computed, counted, and left out."""
    for path, body in (
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 0}),
        ("/v1/chat/completions", {"messages": CHAT, "prompt_logprobs": 1}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}}),
    ):  # fmt: skip
        error = post(tiny, path, **body, stream=True).json()["error"]
        assert error["param"].removeprefix("sampling_params.") == "prompt_logprobs", path


def test_options_of_a_stream_are_refused_without_one(tiny):
    body = {"prompt": "a", "max_tokens": 1, "stream_options": {"include_usage": True}}
    answer = post(tiny, "/v1/completions", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")
    assert post(tiny, "/v1/completions", **body, stream=True).status_code == 200


@pytest.mark.parametrize(("field", "value"), [
    ("min_tokens", 10**6), ("stop_token_ids", [10**6]), ("logit_bias", {"1000000": 1}),
    ("max_tokens", 10**6), ("prompt_logprobs", -1), ("stop", ["a"] * 17),
])  # fmt: skip
def test_a_field_within_another_is_refused_by_its_whole_name(tiny, field, value):
    body = {"token_ids": [1, 40], "sampling_params": {field: value}}
    error = post(tiny, "/inference/v1/generate", **body).json()["error"]
    assert error["param"] == f"sampling_params.{field}" and error["message"].startswith(
        error["param"]
    )


def test_usage_is_told_with_every_chunk_where_it_is_asked_for(tiny):
    """As guidellm asks, which looks at /health first."""
    assert httpx.get(f"{tiny[0]}/health").status_code == 200
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = post(tiny, "/v1/completions", model=NAME, prompt="a", max_tokens=4, seed=1,
                    ignore_eos=True, stream=True, stream_options=options)  # fmt: skip
    chunks = [json.loads(each[6:]) for each in streamed.text.split("\n\n")
              if each.startswith("data: {")]  # fmt: skip
    counts = [each["usage"]["completion_tokens"] for each in chunks]
    assert counts == sorted(counts) and counts[-1] == 4 and not chunks[-1]["choices"]


# --- /v1/responses -------------------------------------------------------------------------------


def test_a_response_is_the_chat_s_answer_in_other_words(client):
    knobs = {"model": NAME, "temperature": 0}
    made = client.responses.create(**knobs, input="1 + 1?", instructions="Be short.",
                                   max_output_tokens=12)  # fmt: skip
    messages = [{"role": "system", "content": "Be short."}, *CHAT]
    chat = client.chat.completions.create(**knobs, messages=messages, max_tokens=12)
    assert made.output_text == chat.choices[0].message.content
    assert type(made).model_validate(made.model_dump()) == made, "no field is missing"
    assert made.status == "incomplete" and made.incomplete_details.reason == "max_output_tokens"
    assert made.usage.output_tokens == chat.usage.completion_tokens == 12
    items = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [
        {"type": "input_text", "text": "1 + 1?"}]}]  # fmt: skip
    events = list(client.responses.create(**knobs, input=items, max_output_tokens=12, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == (
        made.output_text
    )
    assert [events[0].type, events[-1].type] == ["response.created", "response.incomplete"]
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert events[-1].response.output_text == made.output_text


@pytest.mark.parametrize("name", ["previous_response_id", "conversation", "prompt",
                                  "max_tool_calls"])  # fmt: skip
def test_a_field_of_responses_that_is_not_supported_may_be_null(tiny, name):
    body = {"input": "1 + 1?", "max_output_tokens": 1}
    assert post(tiny, "/v1/responses", **body, **{name: None}).status_code == 200
    error = post(tiny, "/v1/responses", **body, **{name: "x"}).json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_a_response_s_log_probs_are_the_chat_s(client):
    knobs = {"model": NAME, "temperature": 0, "top_logprobs": 2}
    asked = {**knobs, "input": "1 + 1?", "max_output_tokens": 12,
             "include": ["message.output_text.logprobs"]}  # fmt: skip
    chat = client.chat.completions.create(**knobs, messages=CHAT, max_tokens=12, logprobs=True)
    expected = [(each.token, each.logprob, [(one.token, one.logprob) for one in each.top_logprobs])
                for each in chat.choices[0].logprobs.content]  # fmt: skip
    assert len(expected) == 12

    def told(logprobs):
        return [(each.token, each.logprob, [(one.token, one.logprob) for one in each.top_logprobs])
                for each in logprobs]  # fmt: skip

    made = client.responses.create(**asked)
    assert told(made.output[0].content[0].logprobs) == expected
    events = list(client.responses.create(**asked, stream=True))
    deltas = [e.logprobs for e in events if e.type == "response.output_text.delta"]
    assert told(sum(deltas, [])) == expected[: len(sum(deltas, []))]
    assert told(events[-1].response.output[0].content[0].logprobs) == expected


def test_a_response_is_sampled_with_vllm_s_settings(client):
    further = {"seed": 3, "top_k": 5, "ignore_eos": True, "repetition_penalty": 1.5}
    made = client.responses.create(
        model=NAME, input="1 + 1?", max_output_tokens=12, extra_body=further
    )
    chat = client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=12, extra_body=further
    )
    assert made.output_text == chat.choices[0].message.content


def test_a_forced_call_comes_before_a_response_format(client):
    told = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}
    asked = {**ASKED, "tools": TOOLS, "tool_choice": NAMED, "response_format": told}
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"a", "op"}


def test_responses_call_tools_and_read_what_they_gave(client):
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    asked = {"model": NAME, "input": "1 + 1?", "tools": tools, "max_output_tokens": 200}
    made = client.responses.create(**asked, tool_choice={"type": "function", "name": "add"})
    (call,) = made.output
    assert (call.type, call.name) == ("function_call", "add")
    streamed = client.responses.create(**asked, tool_choice="required", parallel_tool_calls=False,
                                       stream=True)  # fmt: skip
    (done,) = [e.arguments for e in streamed if e.type == "response.function_call_arguments.done"]
    assert set(json.loads(done)) == {"a", "op"}
    told = [{"role": "user", "content": "1 + 1?"}, call.model_dump(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "2"}]  # fmt: skip
    again = client.responses.create(**{**asked, "input": told, "max_output_tokens": 3})
    assert again.usage.output_tokens == 3
    schema = {"type": "json_schema", "name": "x", "schema": PARAMETERS}
    guided = client.responses.create(**{**asked, "tools": []}, text={"format": schema})
    assert set(json.loads(guided.output_text)) == {"a", "op"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "name"), [
    ({"max_output_tokens": 10**6}, "max_output_tokens"), ({"input": "a" * 5000}, "input"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "objekt"}}}},
     "text.format.schema"),
])  # fmt: skip
def test_errors_of_responses_name_their_own_fields(tiny, body, name, stream):
    answer = post(tiny, "/v1/responses", **{"input": "a", **body, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert error["message"].startswith(name)


def test_an_error_in_the_midst_of_a_response_s_stream_is_one_to_openai_s_client():
    async def events():
        yield {"type": "response.created", "sequence_number": 0, "response": {}}
        raise ApiError(503, "The engine has ended.", code="engine_ended")

    sent = []

    async def send(message) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> None:
        await asyncio.Event().wait()

    asyncio.run(EventStream(events(), 30.0, names=True, ends=b"")({}, receive, send))
    body, kind = b"".join(sent), {"content-type": "text/event-stream"}
    told = json.loads(body.rpartition(b"data: ")[2])
    error = openai.types.responses.ResponseErrorEvent.model_validate(told, strict=True)
    assert (error.type, error.sequence_number, error.code) == ("error", 1, "engine_ended")
    answer = httpx.MockTransport(lambda request: httpx.Response(200, content=body, headers=kind))
    with openai.OpenAI(api_key="none", http_client=httpx.Client(transport=answer)) as client:
        read = client.responses.create(model=NAME, input="a", stream=True)
        assert next(read).type == "response.created"
        with pytest.raises(openai.APIError, match="The engine has ended") as caught:
            next(read)
    assert caught.value.code == "engine_ended"


def test_a_response_that_was_aborted_is_not_complete():
    async def ask() -> None:
        async with asgi_client(made := service()) as http:
            for stream in (False, True):
                body = {"input": "a", "ignore_eos": True, "stream": stream}
                asking = asyncio.create_task(http.post("/v1/responses", json=body))
                while not any(job.num_completion_tokens for job in made.jobs.values()):
                    await asyncio.sleep(0.001)
                for job in made.jobs.values():
                    job.abort()
                text = (await asking).text
                told = (
                    json.loads(text.split("data: ")[-1])["response"] if stream else json.loads(text)
                )
                assert (told["status"], told["incomplete_details"]) == (
                    "incomplete", {"reason": "aborted"},
                )  # fmt: skip

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


def test_a_response_to_nothing_is_refused(tiny):
    for nothing in ([], [{"type": "reasoning"}]):
        answer = post(tiny, "/v1/responses", model=NAME, input=nothing)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


# --- the server itself ---------------------------------------------------------------------------


def test_the_description_names_errors_and_keys(tiny):
    described = httpx.get(f"{tiny[0]}/openapi.json", timeout=DEADLINE_S).json()
    chat = described["paths"]["/v1/chat/completions"]["post"]
    assert {"200", "400", "401", "404", "429", "503"} <= set(chat["responses"])
    assert all("422" not in operation["responses"] for operations in described["paths"].values()
               for operation in operations.values())  # fmt: skip
    schema = chat["responses"]["429"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/ErrorBody"}
    assert chat["security"] == [{"key": []}]
    pause = described["paths"]["/pause"]["post"]
    assert pause["security"] == [{"admin_key": []}] and "403" in pause["responses"]
    assert "security" not in described["paths"]["/readyz"]["get"]
    assert {"key", "admin_key"} <= set(described["components"]["securitySchemes"])


def test_a_server_whose_engine_ends_ends_too():
    made = service()
    server = HttpServer(made, ends_with_engine=True)
    server.config.port = 0
    server.on_start = made.host.close
    server.serve_here()
    assert server.engine_has_ended


@pytest.mark.parametrize(
    "changes",
    [{"admin_key": "root"}, {"requests_per_minute": 3}, {"tokens_per_minute": 3}],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("replicas", [{"replicas": 2}, {"max_replicas": 2}])
def test_what_would_hold_for_one_replica_of_several_is_refused(changes, replicas):
    with pytest.raises(ValueError, match="must come with one replica"):
        ServeSettings(model="m", **changes, **replicas)
    ServeSettings(model="m", **changes)


def test_sessions_and_limits_of_a_file_are_of_one_replica(tmp_path):
    from rllib_llm.serving.security import read_clients

    keys = tmp_path / "keys.yaml"
    keys.write_text("- {key: k, tokens_per_minute: 3}\n")
    with pytest.raises(Problems, match="tokens_per_minute of api_keys_file"):
        read_clients(ServeSettings(model="m", api_keys_file=keys, replicas=2))

    async def ask() -> None:
        async with asgi_client(service(replicas=2)) as http:
            body = {"messages": CHAT}
            answer = await http.post("/sessions/s/v1/chat/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "sessions_off")

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))
