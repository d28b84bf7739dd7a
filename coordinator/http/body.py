"""From a request's bytes to its checked fields. What is too large, no JSON, unknown or of a wrong type is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, from_json
from starlette.requests import ClientDisconnect, Request

from coordinator.http.errors import BodyTooLargeError, BodyTooSlowError, ClientLeftError, FieldError
from coordinator.http.refused import RefusedFields, shown
from kvrelay.errors import InvalidRequestError

MAX_BODY_BYTES = 8 * 2**20  # of the longest text that is tokenized every character takes two
BODY_TIMEOUT_S = 60.0
REFUSED = "refused"  # pydantic's name for what `Fields` finds before the fields are looked at

T = TypeVar("T")
# Of wrong entries the first is told. pydantic would list each: millions, of the largest body, which take 15 s to write.
Entries = Annotated[list[T], Field(fail_fast=True)]


class Fields(BaseModel):
    """An object of a body. Types are strict: "5" is no number. `refused` are known fields that are not served."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
    refused: ClassVar[RefusedFields] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, one in value.items():
            if fault := cls._fault_before(name, one, known):
                raise PydanticCustomError(REFUSED, "{name} {fault}", {"name": name, "fault": fault})
        return {name: one for name, one in value.items() if name not in cls.refused}

    @classmethod
    def _fault_before(cls, name: str, value: Any, known: Container[str]) -> str | None:
        """Of an unknown field too: pydantic would list every one."""
        if name in cls.refused:
            return cls.refused[name].fault(value)
        return None if name in known else "is no field of this request; leave it out"

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """With the refused fields, which may say nothing."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, refused in cls.refused.items():
            usual = [None, *refused.usual]
            schema["properties"][name] = {"enum": usual, "description": f"Not served: {refused.why}."}
        return schema


F = TypeVar("F", bound=Fields)


async def read_fields(request: Request, kind: type[F]) -> F:
    """Raises InvalidRequestError of some kind, ClientLeftError when the client goes before all has come."""
    request.state.fields = kind.model_fields
    return parse(kind, await _read(request))


def parse(kind: type[F], body: bytes) -> F:
    """Raises FieldError naming field, value and what is allowed, or InvalidRequestError where no field is to blame."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not JSON that is served: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body is {shown(value)}; allowed is a JSON object")
    return checked(kind, value)


def checked(kind: type[F], value: dict[str, Any], where: str = "") -> F:
    """`where` stands before the names of fields in errors. Raises FieldError."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _field_error(error.errors(include_url=False), where) from error


async def _read(request: Request) -> bytes:
    """At most MAX_BODY_BYTES, within BODY_TIMEOUT_S."""
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError as error:
        raise BodyTooSlowError(f"the body did not come within {BODY_TIMEOUT_S:g} s") from error
    except ClientDisconnect as error:
        raise ClientLeftError from error
    return bytes(body)


def _too_large() -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is larger than {MAX_BODY_BYTES} bytes, the most that is read")


def _field_error(errors: list[ErrorDetails], where: str) -> FieldError:
    """Of the fault that lies deepest: of the kinds that a field may have it is the one that was meant."""
    fault = max(errors, key=lambda one: len(one["loc"]))
    if fault["type"] == REFUSED:
        field = where + _path((*fault["loc"], fault["ctx"]["name"]))
        return FieldError(f"{field} {fault['ctx']['fault']}", field)
    field = where + _path(fault["loc"])
    if fault["type"] == "missing":
        return FieldError(f"{field} is missing", field)
    return FieldError(f"{field} is {shown(fault['input'])}: {fault['msg']}", field)


def _path(location: tuple[int | str, ...]) -> str:
    """As a[0].b; names of kinds that pydantic puts between are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _KINDS and "[" not in part:
            path += f".{part}" if path else part
    return path


_KINDS = ("str", "int", "float", "bool")
