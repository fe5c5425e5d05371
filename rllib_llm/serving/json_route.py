"""Routes whose body is read in one go: pydantic takes the bytes and finds the mistakes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, get_type_hints

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from rllib_llm.serving.errors import ApiError
from rllib_llm.serving.schemas import NEUTRAL_VALUES

Body = TypeVar("Body", bound=BaseModel)
# Of pydantic's error locations: branches of a union, which are no fields.
_BRANCHES = {"str", "int", "float", "bool"}


class JsonRoute(APIRoute):
    """A route `endpoint(body: Model, ...)` whose other parameters are the request and texts of the
    path. FastAPI describes it as any other; what it does between a request and its endpoint, which
    takes longer than all the rest of a request, is left out."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI's, where the endpoint takes no body."""
        endpoint = self.endpoint
        model = get_type_hints(endpoint).get("body")
        if model is None:
            return super().get_route_handler()
        takes_request = "request" in inspect.signature(endpoint).parameters

        async def handle(request: Request) -> Response:
            given: dict[str, Any] = {"request": request} if takes_request else {}
            kind = request.headers.get("content-type", "")
            body = read_body(model, await request.body(), kind)
            answer = await endpoint(body=body, **given, **request.path_params)
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        return handle


def read_body(model: type[Body], raw: bytes, content_type: str) -> Body:
    """What a request holds.

    Raises:
        ApiError: 400, naming the field that is wrong.
    """
    kind = content_type.partition(";")[0].strip().lower()
    is_json = kind == "application/json" or kind.startswith("application/") and "+json" in kind
    if not is_json:
        raise _not_json(content_type)
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise field_error(list(error.errors(include_url=False)), content_type) from error


def _not_json(content_type: str) -> ApiError:
    """What any web page may send is not read."""
    return ApiError(
        400, f"Content-Type={content_type!r} must be application/json: the request is read as "
        "JSON. Send the header (curl: -H 'Content-Type: application/json').",
        param="Content-Type", code="invalid_value",
    )  # fmt: skip


def field_error(errors: list[Any], content_type: str) -> ApiError:
    """What pydantic found, as an answer that names the field."""
    first = errors[0]
    where = [part for part in first["loc"] if part != "body"]
    if not where and "json" not in content_type:
        return _not_json(content_type)
    if first["type"] == "json_invalid" or not where:
        problem = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"The request must be a JSON object: {problem}.", code="invalid_json")
    named: list[str] = []
    for part in where:
        if isinstance(part, str) and (part in _BRANCHES or "[" in part):
            break
        named.append(str(part))
    name = ".".join(named)
    if first["type"] == "extra_forbidden":
        if named[-1] in NEUTRAL_VALUES:
            value = json.dumps(first["input"], default=str)[:100]
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
