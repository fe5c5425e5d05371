"""Schemas of requests, whose fields are refused by name if they are not listed here, and the errors
of requests in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.responses import JSONResponse

from rllib_llm.shared.errors import did_you_mean

# Fields that OpenAI documents and this server has nothing to do with: taken, where they ask for
# what it does anyway.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (None,), "best_of": (None, 1),
    "function_call": (None,), "functions": (None,),
    "modalities": (None, ["text"]), "moderation": (None,), "prediction": (None,),
    "prompt_cache_options": (None,), "suffix": (None, ""),
    "verbosity": (None,), "web_search_options": (None,),
    # Of vLLM's.
    "allowed_token_ids": (None,), "bad_words": (None, []), "detokenize": (None, False, True),
    "skip_special_tokens": (None, True), "spaces_between_special_tokens": (None, True),
}  # fmt: skip
MAX_BIASES = MAX_STOP_TOKENS = 1024
MAX_MESSAGES, MAX_TOOLS, MAX_FIELDS = 2**14, 2**10, 256
MAX_LOGPROBS = 2**19  # of an answer, in which each takes about 500 bytes until it is sent
MAX_DECODED = 2**18  # tokens, which hold the interpreter for 60 ms
MAX_CHOICES, MAX_STOPS, MAX_LIKELIEST, MAX_PROMPTS = 128, 16, 20, 256

# Bounds of an element would take twice the time of a large list, in the event loop:
# `jobs.check_tokens` has them.
Token = Annotated[int, Field(json_schema_extra={"minimum": 0, "exclusiveMaximum": 2**31})]
Tokens = Annotated[list[Token], Field(fail_fast=True)]  # one error, and not one for each element
TokenIds = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Mapped = Annotated[dict[str, Any], Field(max_length=MAX_FIELDS)]


def _few_fields(given: Any) -> Any:
    """Rejects very many fields first: each unknown one is an error of its own, or is copied."""
    if isinstance(given, dict) and len(given) > MAX_FIELDS:
        raise ValueError(f"it has more than {MAX_FIELDS} fields")
    return given


def _few_biases(given: Any) -> Any:
    """Rejects too many biases first, since each invalid one is an error of its own."""
    if isinstance(given, dict) and len(given) > MAX_BIASES:
        raise ValueError(f"it has more than {MAX_BIASES} entries")
    return given


def _few_fields_each(given: Any) -> Any:
    """Rejects messages of very many fields first."""
    for each in given if isinstance(given, list) else ():
        _few_fields(each)
    return given


def _no_number(given: Any) -> Any:
    """Rejects 0, which Python calls equal to False."""
    if given is not False and given == 0:
        raise ValueError("it is a number")
    return given


Biases = Annotated[dict[TokenKey, Bias], BeforeValidator(_few_biases)]


class Strict(BaseModel):
    """Refuses unknown fields and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, given: Any) -> Any:
        return _few_fields(given)


class Open(BaseModel):
    """Takes further fields as they are."""

    model_config = ConfigDict(extra="allow", strict=True)


class Item(BaseModel):
    """An item of a response's input; fields that an answer had beside these are passed over."""

    model_config = ConfigDict(extra="ignore", strict=True)


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(Strict):
    """How tokens are sampled; null is the default."""

    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: Biases | None = Field(None, max_length=MAX_BIASES)
    seed: Seed | None = None
    # With the seed they name a completion's randomness as a run does: see `protocol.Noise`.
    noise_row: int | None = Field(None, ge=0, lt=2**62)
    noise_turn: int | None = Field(None, ge=0, lt=2**62)
    stop: str | Annotated[list[Text], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: (
        Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None
    ) = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral_fields(cls, given: Any) -> Any:
        """Drops unsupported fields whose value asks for the default behaviour; other values are
        refused."""
        if not isinstance(given, dict) or NEUTRAL_VALUES.keys().isdisjoint(given):
            return given
        return {
            name: value
            for name, value in given.items()
            if name not in NEUTRAL_VALUES or name in cls.model_fields
            or not any(value is same or value == same and type(value) is not bool
                       for same in NEUTRAL_VALUES[name])
        }  # fmt: skip


class SamplingFields(Sampling):
    """How many completions are sampled, of how many tokens, and how."""

    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=0, lt=2**31)


class OfAll(Strict):
    """Fields of OpenAI's endpoints."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Taken, without an effect; /v1/responses tells the metadata again.
    user: str | None = None
    store: bool | None = None
    metadata: Mapped | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class OpenAIFields(SamplingFields, OfAll):
    """Fields of both completion endpoints."""

    return_token_ids: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)
    prompt_cache_retention: str | None = None  # taken, without an effect


class FunctionSpec(Open):
    """A function that the model may call."""

    name: Text
    description: str | None = None
    parameters: Mapped | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Annotated[FunctionSpec, BeforeValidator(_few_fields)]


class TextPart(Strict):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class FunctionCall(Open):
    """The function of a call, and its arguments as JSON in a text or as an object."""

    name: Text
    arguments: str | Mapped | None = None


class MessageToolCall(Open):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Message(Open):
    """A message of a chat. Further fields are handed to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None


Messages = Annotated[
    list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True), BeforeValidator(_few_fields_each)
]


class FunctionName(Strict):
    """A tool by its name."""

    name: Text


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Strict):
    """A schema that the answer keeps to."""

    name: str
    description: str | None = None
    schema_: Mapped | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The format of the answer: JSON Schema, a regular expression or a Lark grammar."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None


class ChatRequest(OpenAIFields):
    """POST /v1/chat/completions"""

    messages: Annotated[Messages, Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Mapped | None = None


class CompletionRequest(OpenAIFields):
    """POST /v1/completions"""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | (Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)])
    )
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)
    response_format: ResponseFormat | None = None


class GenerateParams(SamplingFields):
    """How /inference/v1/generate samples."""

    logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)
    # Taken, without an effect on tokens.
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    detokenize: bool | None = None
    routed_experts_prompt_start: int | None = None  # there are no experts
    reasoning_effort: str | None = None  # verifiers': it is in the prompt already


class GenerateRequest(Strict):
    """POST /inference/v1/generate"""

    token_ids: TokenIds
    sampling_params: GenerateParams = Field(
        default_factory=lambda: GenerateParams.model_validate({})
    )
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] | None = None
    # Taken, without an effect: prompts share no cache across requests, and all are equal.
    cache_salt: str | None = None
    priority: int | None = None


class TokenizeRequest(Strict):
    """POST /tokenize"""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[Tokens, Field(max_length=MAX_DECODED)]


class RewardRequest(Strict):
    """POST /sessions/{id}/reward"""

    reward: float = Field(allow_inf_nan=False)


class UpdateRequest(Strict):
    """POST /update_weights"""

    path: Text
    version: int | None = Field(None, ge=0, lt=2**31)
    epoch: int | None = Field(None, ge=0, lt=2**63)


class AbortRequest(Strict):
    """POST /abort_requests"""

    request_ids: Annotated[list[str], Field(fail_fast=True)] | None = None


# --- /v1/responses -------------------------------------------------------------------------------


class ResponsePart(Item):
    """A piece of an item's text."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ResponsePart], Field(fail_fast=True)]


class CallItem(Item):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: str
    name: Text
    arguments: str


class CallOutputItem(Item):
    """The output of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[ResponsePart], Field(fail_fast=True)]


class ReasoningItem(Open):
    """The assistant's reasoning; ignored."""

    type: Literal["reasoning"]


class ResponseTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: Text
    description: str | None = None
    parameters: Mapped | None = None
    strict: bool | None = None


class ResponseToolName(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    name: Text


class TextFormat(Strict):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Mapped | None = Field(None, alias="schema")
    strict: bool | None = None


class TextSettings(Strict):
    """The answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseRequest(Sampling, OfAll):
    """POST /v1/responses: the fields that a server without stored responses supports, and vLLM's
    sampling settings."""

    input: (
        str | Annotated[
            list[MessageItem | CallItem | CallOutputItem | ReasoningItem],
            Field(max_length=MAX_MESSAGES, fail_fast=True), BeforeValidator(_few_fields_each),
        ]
    )  # fmt: skip
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolName | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)
    # Taken, without an effect.
    truncation: Literal["disabled"] | None = None
    reasoning: Mapped | None = None
    background: Annotated[Literal[False], BeforeValidator(_no_number)] | None = None


# --- errors --------------------------------------------------------------------------------------

MAX_TOLD = 100  # characters of a value or a name that came
_MAX_MESSAGE = 2**12
# Of pydantic's error locations: branches of a union, which are no fields.
_BRANCHES = {"str", "int", "float", "bool"}
_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 429: "rate_limit_error", 503: "unavailable_error", 504: "timeout_error",
}  # fmt: skip


class ErrorDetail(BaseModel):
    """The details of a request's error."""

    message: str
    type: str
    param: str | None = None
    """The field of the request that it is about."""
    code: str | None = None
    """A word that programs can compare."""


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that is an error.

    Args:
        message: what is wrong and what to do.
        param, code: see `ErrorDetail`; the code of a 400 that names a field is "invalid_value".
        headers: further ones, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        if code is None and status == 400 and param is not None:
            code = "invalid_value"
        if len(message) > _MAX_MESSAGE:  # what came may be in it
            message = f"{message[:_MAX_MESSAGE]} ..."
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def rename(self, param: str) -> None:
        """Names its field as the client's request calls it."""
        self.message = self.message.replace(str(self.param), param, 1)
        self.args, self.param = (self.message,), param

    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _KINDS.get(self.status, kind)
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}

    def response(self) -> JSONResponse:
        """The response."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def failed() -> ApiError:
    """The answer where the fault is the server's. uvicorn closes the connection behind it."""
    headers = {"Connection": "close"}
    return ApiError(500, "The server failed; its log says how.", headers=headers)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route, for its description; 400 is among them."""
    told = {
        400: "A field is wrong, and named.", 401: "The key is missing or wrong.",
        403: "The administration is off.", 404: "There is no such model or session.",
        408: "The request was sent too slowly.",
        409: "The weights did not come in time, or cannot be loaded now.",
        413: "The request is too large.", 429: "Too many requests or tokens, or the queue is full.",
        503: "The server starts or stops, or its engine has ended.",
        504: "The answer took too long.",
    }  # fmt: skip
    wanted = sorted({400, 408, 413, *statuses})
    return {status: {"description": told[status], "model": ErrorBody} for status in wanted}


def not_json(content_type: str) -> ApiError:
    """The answer to a body that any web page may send, which is not read."""
    return ApiError(
        400, f"Content-Type={content_type!r} must be application/json: the request is read as "
        "JSON. Send the header (curl: -H 'Content-Type: application/json').",
        param="Content-Type",
    )  # fmt: skip


_REQUESTS: dict[str, type[BaseModel]] = {
    "/chat/completions": ChatRequest, "/completions": CompletionRequest,
    "/responses": ResponseRequest, "/generate": GenerateRequest,
}  # fmt: skip
_NESTED: dict[str, type[BaseModel]] = {
    "sampling_params": GenerateParams, "stream_options": StreamOptions,
    "response_format": ResponseFormat,
}  # fmt: skip


def field_error(errors: Sequence[Any], content_type: str, path: str) -> ApiError:
    """pydantic's error as a response that names the field; `path`: of the route."""
    first = errors[0]
    where = [part for part in first["loc"] if part != "body"]
    if not where:
        if "json" not in content_type:
            return not_json(content_type)
        return ApiError(
            400, f"The request must be a JSON object: {first['msg']}.", code="invalid_json"
        )
    named: list[str] = []
    for part in where:
        if isinstance(part, str) and (part in _BRANCHES or "[" in part):
            break
        named.append(str(part)[:MAX_TOLD])
    name = ".".join(named)
    if first["type"] == "extra_forbidden":
        if named[-1] in NEUTRAL_VALUES:
            value = repr(first["input"])[:MAX_TOLD]
            return ApiError(
                400, f"{name}={value} is not supported here. Leave it out.", param=name,
                code="unsupported_parameter",
            )  # fmt: skip
        if named[1:]:
            model = _NESTED.get(named[-2])
        else:
            model = next((each for end, each in _REQUESTS.items() if path.endswith(end)), None)
        known = () if model is None else model.model_fields
        return ApiError(
            400, f"{name} is no field of this request. "
            f"{did_you_mean(named[-1], known, otherwise='Leave it out.')}", param=name,
            code="unknown_parameter",
        )  # fmt: skip
    if first["type"] == "missing":
        return ApiError(
            400, f"{name} must be given.", param=name, code="missing_required_parameter"
        )
    is_short = isinstance(first["input"], str | int | float | None)
    value = f"={repr(first['input'])[:MAX_TOLD]}" if is_short else ""
    return ApiError(400, f"{name}{value} must be corrected: {first['msg']}.", param=name)
