"""Schemas of requests, whose fields are refused by name if they are not listed here, and the errors
of requests in OpenAI's format: whatever answers a request raises `ApiError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.responses import JSONResponse

from rllib_llm.shared.errors import did_you_mean

# Fields that OpenAI or vLLM documents and this server has nothing to do with: taken where they are
# null, or ask for what it does anyway.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (), "audio": (), "bad_words": ([],), "best_of": (1,), "conversation": (),
    "detokenize": (False, True), "function_call": (), "functions": (), "max_tool_calls": (),
    "modalities": (["text"],), "moderation": (), "prediction": (), "previous_response_id": (),
    "prompt": (), "prompt_cache_options": (), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "suffix": ("",), "verbosity": (),
    "web_search_options": (),
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
StopTokenIds = Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Mapped = Annotated[dict[str, Any], Field(max_length=MAX_FIELDS)]


def _few_fields(given: Any, most: int = MAX_FIELDS) -> Any:
    """Rejects an object of very many fields, or a list of such, first: each unknown or invalid one
    is an error of its own, or is copied."""
    for each in given if isinstance(given, list) else (given,):
        if isinstance(each, dict) and len(each) > most:
            raise ValueError(f"it has more than {most} fields")
    return given


def _no_number(given: Any) -> Any:
    """Rejects 0, which Python calls equal to False."""
    if given is not False and given == 0:
        raise ValueError("it is a number")
    return given


Biases = Annotated[dict[TokenKey, Bias], BeforeValidator(partial(_few_fields, most=MAX_BIASES))]


class Strict(BaseModel):
    """Refuses unknown fields and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, given: Any) -> Any:
        return _few_fields(given)


_WHOLE = "come without stream=true"  # chunks have no place for it


def _rule(param: str, holds: object, rule: str, code: str = "unsupported_value") -> None:
    refuse(not holds, f"{param} must {rule}.", param, code)


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


class DecodingFields(Strict):
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
    stop_token_ids: StopTokenIds | None = None
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
                       for same in (None, *NEUTRAL_VALUES[name]))
        }  # fmt: skip


class SamplingFields(DecodingFields):
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

    @model_validator(mode="after")
    def _keeps_rules(self) -> OfAll:
        _rule("stream_options", self.stream or self.stream_options is None, "come with stream=true")
        return self


class OpenAIFields(SamplingFields, OfAll):
    """Fields of both completion endpoints."""

    return_token_ids: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)
    prompt_cache_retention: str | None = None  # taken, without an effect

    @model_validator(mode="after")
    def _is_whole(self) -> OpenAIFields:
        _rule("prompt_logprobs", not self.stream or self.prompt_logprobs is None, _WHOLE)
        return self


class FunctionSpec(Open):
    """A function that the model may call."""

    name: Text
    description: str | None = None
    parameters: Mapped | None = None


class ToolSchema(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Annotated[FunctionSpec, BeforeValidator(_few_fields)]


class TextPart(Strict):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """Where an image is: a data URL, or a file below the server's allowed_local_media_path."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None  # taken, without an effect


class ImagePart(Strict):
    """An image of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class FunctionCall(Open):
    """The function of a call, and its arguments as JSON in a text or as an object."""

    name: Text
    arguments: str | Mapped | None = None


class MessageToolCall(Open):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(Open):
    """A message of a chat. Further fields are handed to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart | ImagePart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None


Messages = Annotated[
    list[ChatMessage],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_few_fields),
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
    tools: Annotated[list[ToolSchema], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Mapped | None = None

    @model_validator(mode="after")
    def _has_logprobs(self) -> ChatRequest:
        told = self.logprobs or not self.top_logprobs
        _rule("top_logprobs", told, "come with logprobs=true", "invalid_value")
        return self


_OF_PROMPTS = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)


class ChatBatchRequest(ChatRequest):
    """POST /v1/chat/completions/batch, vLLM's: chats that have nothing to do with each other"""

    messages: Annotated[  # type: ignore[assignment]
        list[Annotated[Messages, Field(min_length=1)]], _OF_PROMPTS
    ]

    @model_validator(mode="after")
    def _has_one_answer_each(self) -> ChatBatchRequest:
        for name in ("stream", "tools", "prompt_logprobs"):
            _rule(name, not getattr(self, name), "be left out of a batch", "unsupported_value")
        _rule("n", (self.n or 1) == 1, "be 1 in a batch", "unsupported_value")
        return self


class CompletionRequest(OpenAIFields):
    """POST /v1/completions"""

    prompt: (
        str | TokenIds | Annotated[list[str], _OF_PROMPTS] | Annotated[list[TokenIds], _OF_PROMPTS]
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

    @model_validator(mode="after")
    def _keeps_rules(self) -> GenerateRequest:
        params, is_text = self.sampling_params, self.output_mode == "text"
        is_whole = not self.stream or params.prompt_logprobs is None
        _rule("sampling_params.prompt_logprobs", is_whole, _WHOLE)
        _rule("sampling_params.skip_special_tokens", not is_text or params.skip_special_tokens
              is not False, "be true with output_mode='text'")  # fmt: skip
        return self


class TokenizeRequest(Strict):
    """POST /tokenize"""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[ToolSchema], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _keeps_rules(self) -> TokenizeRequest:
        is_one = (self.prompt is None) != (self.messages is None)
        _rule("prompt", is_one, "be given, or messages, and not both", "invalid_value")
        return self


class DetokenizeRequest(Strict):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[Tokens, Field(max_length=MAX_DECODED)]


class SessionRewardRequest(Strict):
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


class TextFormat(JsonSchema):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None  # type: ignore[assignment]


class TextSettings(Strict):
    """The answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseRequest(DecodingFields, OfAll):
    """POST /v1/responses: the fields that a server without stored responses supports, and vLLM's
    sampling settings."""

    input: (
        str | Annotated[
            list[MessageItem | CallItem | CallOutputItem | ReasoningItem],
            Field(max_length=MAX_MESSAGES, fail_fast=True), BeforeValidator(_few_fields),
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
# Of pydantic's error locations: branches of a union, beside our classes.
_BRANCHES = {"str", "int", "float", "bool"}
_AGAIN, _CLOSE = {"Retry-After": "1"}, {"Connection": "close"}  # at which uvicorn closes it
# By status: OpenAI's type of the error, headers, and what it means, for the description.
_STATUSES: dict[int, tuple[str, dict[str, str], str]] = {
    400: ("invalid_request_error", {}, "A field is wrong, and named."),
    401: ("authentication_error", {"WWW-Authenticate": "Bearer"}, "The key is missing or wrong."),
    403: ("permission_error", {}, "The administration is off."),
    404: ("not_found_error", {}, "There is no such model or session."),
    408: ("timeout_error", _CLOSE, "The request was sent too slowly."),
    409: ("invalid_request_error", {},
          "The weights did not come in time, or cannot be loaded now."),
    413: ("invalid_request_error", {}, "The request is too large."),
    429: ("rate_limit_error", _AGAIN, "Too many requests or tokens, or the queue is full."),
    500: ("server_error", _CLOSE, ""),
    503: ("unavailable_error", _AGAIN, "The server starts or stops, or its engine has ended."),
    504: ("timeout_error", {}, "The answer took too long."),
}  # fmt: skip


class ErrorDetail(BaseModel):
    """The details of a request's error: `param` is the field that it is about, and `code` a word
    that programs can compare."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


FAILED = "The server failed; its log says how."


class ApiError(Exception):
    """An answer that is an error.

    Args:
        message: what is wrong and what to do; a long one, in which may be what came, is cut.
        param, code: see `ErrorDetail`; the code of a 400 that names a field is "invalid_value".
        headers: further ones than the status has.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        if code is None and status == 400 and param is not None:
            code = "invalid_value"
        self.status, self.param, self.code = status, param, code
        self.message = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]} ..."
        self.type, known, _ = _STATUSES.get(status, _STATUSES[400])
        self.headers = {**known, **(headers or {})}

    def body(self) -> dict[str, Any]:
        """The body of the response."""
        told = {"message": self.message, "type": self.type}
        return {"error": {**told, "param": self.param, "code": self.code}}

    def named(self, names: Mapping[str, str]) -> ApiError:
        """The same, its field as the client's request calls it. names: by our own."""
        param = str(self.param)
        told = names.get(param) or names.get(param.partition(".")[0])
        if told is None:
            return self
        message = self.message.replace(param, told, 1)
        return ApiError(self.status, message, told, self.code, self.headers)

    def response(self) -> JSONResponse:
        """The response."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def refuse(
    broken: object, message: str, param: str | None = None, code: str | None = None,
    status: int = 400,
) -> None:  # fmt: skip
    """Raises ApiError where a rule is broken."""
    if broken:
        raise ApiError(status, message, param, code)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route, for its description; 400 is among them."""
    wanted = sorted({400, 408, 413, *statuses})
    return {each: {"description": _STATUSES[each][2], "model": ErrorBody} for each in wanted}


_REQUESTS: dict[str, type[BaseModel]] = {
    "/chat/completions": ChatRequest, "/completions": CompletionRequest,
    "/responses": ResponseRequest, "/generate": GenerateRequest,
}  # fmt: skip
_NESTED: dict[str, type[BaseModel]] = {
    "sampling_params": GenerateParams, "stream_options": StreamOptions,
    "response_format": ResponseFormat,
}  # fmt: skip


def _is_branch(part: Any) -> bool:
    """Whether a part of an error's location is a branch of a union, which is no field."""
    is_type = part in _BRANCHES or isinstance(globals().get(part), type)
    return isinstance(part, str) and (is_type or "[" in part)


def _farthest(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The error of the branch which reads most of the first wrong field's value."""
    field = [*takewhile(lambda part: not _is_branch(part), errors[0]["loc"])]
    found = [each for each in errors if [*each["loc"][: len(field)]] == field]

    def read(error: Mapping[str, Any]) -> list[int]:
        return [len(error["loc"]), *(part for part in error["loc"] if isinstance(part, int))]

    farthest = max(map(read, found))
    found = [each for each in found if read(each) == farthest]
    others = {each["loc"][:-1] for each in found if each["type"] == "literal_error"}
    return next((each for each in found if each["loc"][:-1] not in others), found[0])


def field_error(errors: Sequence[Mapping[str, Any]], content_type: str, path: str) -> ApiError:
    """The answer to pydantic's errors, which names the first field; `path`: of the route."""
    first = _farthest(errors)
    where, kind = first["loc"][1:], first["type"]
    if not where:
        if "json" in content_type:
            message = f"The request must be a JSON object: {first['msg']}."
            return ApiError(400, message, code="invalid_json")
        message = f"Content-Type={content_type!r} must be application/json. Send the header."
        return ApiError(400, message, "Content-Type")
    is_name = kind in ("extra_forbidden", "missing")  # the last part
    named = [str(part)[:MAX_TOLD] for i, part in enumerate(where, 1)
             if not _is_branch(part) or is_name and i == len(where)]  # fmt: skip
    name, value = ".".join(named), ""
    if isinstance(first["input"], str | int | float | None):
        value = f"={repr(first['input'])[:MAX_TOLD]}"
    if kind == "missing":
        return ApiError(400, f"{name} must be given.", name, "missing_required_parameter")
    if kind != "extra_forbidden":
        return ApiError(400, f"{name}{value} must be corrected: {first['msg']}.", name)
    if named[-1] in NEUTRAL_VALUES:
        message = f"{name}{value} is not supported here. Leave it out."
        return ApiError(400, message, name, "unsupported_parameter")
    model = _NESTED.get(named[-2]) if named[1:] else next(
        (each for end, each in _REQUESTS.items() if path.endswith(end)), None
    )  # fmt: skip
    near = did_you_mean(named[-1], model.model_fields if model else (), otherwise="Leave it out.")
    return ApiError(400, f"{name} is no field of this request. {near}", name, "unknown_parameter")
