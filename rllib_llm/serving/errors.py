"""Errors of requests in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from rllib_llm.serving.schemas import NEUTRAL_VALUES

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
        status: of HTTP.
        message: what is wrong and what to do.
        param, code: see `ErrorDetail`.
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
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The body of the response."""
        return error_body(self.status, self.message, self.param, self.code)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON of an error."""
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route, for its description; 400 is among them."""
    told = {
        400: "A field is wrong, and named.", 401: "The key is missing or wrong.",
        403: "The administration is off.", 404: "There is no such model or session.",
        408: "The request was sent too slowly.", 409: "The weights did not come in time.",
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
        param="Content-Type", code="invalid_value",
    )  # fmt: skip


def field_error(errors: Sequence[Any], content_type: str) -> ApiError:
    """pydantic's error as a response that names the field."""
    first = errors[0]
    if first["type"] == "json_invalid":
        problem = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"The request must be a JSON object: {problem}.", code="invalid_json")
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
        named.append(str(part))
    name = ".".join(named)
    if first["type"] == "extra_forbidden":
        if named[-1] in NEUTRAL_VALUES:
            value = repr(first["input"])[:100]
            return ApiError(
                400, f"{name}={value} is not supported here. Leave it out.", param=name,
                code="unsupported_parameter",
            )  # fmt: skip
        return ApiError(
            400, f"{name} is no field of this request. Leave it out.", param=name,
            code="unknown_parameter",
        )  # fmt: skip
    if first["type"] == "missing":
        return ApiError(
            400, f"{name} must be given.", param=name, code="missing_required_parameter"
        )
    return ApiError(400, f"{name} must be corrected: {first['msg']}.", param=name,
                    code="invalid_value")  # fmt: skip
