"""What requests may hold. A field that is not here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# Fields that OpenAI documents and this server has nothing to do with: taken, where they ask for
# what it does anyway.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (None,), "best_of": (None, 1), "frequency_penalty": (None, 0),
    "function_call": (None,), "functions": (None,), "logit_bias": (None, {}),
    "modalities": (None, ["text"]), "moderation": (None,), "prediction": (None,),
    "presence_penalty": (None, 0), "prompt_cache_options": (None,), "suffix": (None, ""),
    "verbosity": (None,), "web_search_options": (None,),
    # Of vLLM's.
    "allowed_token_ids": (None,), "bad_words": (None, []), "detokenize": (None, False, True),
    "min_p": (None, 0), "prompt_logprobs": (None,), "repetition_penalty": (None, 1),
    "skip_special_tokens": (None, True), "spaces_between_special_tokens": (None, True),
}  # fmt: skip
MAX_CHOICES, MAX_STOPS, MAX_LIKELIEST, MAX_PROMPTS = 128, 16, 20, 256

Token = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[Token], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Strict(BaseModel):
    """Takes neither unknown fields nor values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(Strict):
    """How completions are sampled; null is the default."""

    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    seed: Seed | None = None
    # With the seed they name a completion's randomness as a run does: see `protocol.Noise`.
    noise_row: int | None = Field(None, ge=0, lt=2**62)
    noise_turn: int | None = Field(None, ge=0, lt=2**62)
    stop: str | list[Text] | None = None
    stop_token_ids: list[Token] | None = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral_fields(cls, given: Any) -> Any:
        """Drops fields that ask for what is done anyway; with another value they are refused."""
        if not isinstance(given, dict) or NEUTRAL_VALUES.keys().isdisjoint(given):
            return given
        return {
            name: value
            for name, value in given.items()
            if name not in NEUTRAL_VALUES or name in cls.model_fields
            or not any(value is same or value == same and type(value) is not bool
                       for same in NEUTRAL_VALUES[name])
        }  # fmt: skip


class OpenAIFields(SamplingFields):
    """What both completion endpoints take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    # Taken, without an effect.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class FunctionSpec(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionSpec


class TextPart(Strict):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat. Further fields are handed to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class JsonSchema(Strict):
    """A schema that the answer keeps to."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer's text is: JSON Schema, or a regular expression or a Lark grammar."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None


class ChatRequest(OpenAIFields):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(OpenAIFields):
    """POST /v1/completions"""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | (Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)])
    )
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)
    response_format: ResponseFormat | None = None


class GenerateParams(SamplingFields):
    """How /inference/v1/generate samples."""

    logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)


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
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[Token]


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

    request_ids: list[str] | None = None
