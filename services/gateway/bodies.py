"""Request bodies: strict JSON into strict models. Called by the routes.

Python's parser takes NaN, Infinity, numbers that overflow, duplicate keys and lone surrogates; each would
be a value used in silence or an error on the way out. Here each is refused by name.
"""

from __future__ import annotations

import json
import math
from typing import NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, JsonValue, ValidationError

from shared import registry
from shared.errors import FieldProblem, Invalid
from shared.service import read_json_body

M = TypeVar("M", bound=BaseModel)
_SHOWN = 80
_MAX_DEPTH = 64


async def read_body(request: Request, model: type[M]) -> tuple[M, bytes]:
    """The body as `model`, and its bytes (for idempotency). Raises Invalid naming each wrong field."""
    raw = await read_json_body(request)
    data = parse_json(raw)
    if not isinstance(data, dict):
        raise invalid("(body)", f"a JSON object is needed here, not {_kind(data)}")
    try:
        return model.model_validate(data), raw
    except ValidationError as error:
        fields = _known_keys(registry.problems(error), model)
        raise Invalid("; ".join(f"{f.field}: {f.message}" for f in fields), fields=fields) from error


def parse_json(raw: bytes) -> JsonValue:
    """Strict JSON. Raises Invalid for anything that could not be stored and sent back unchanged."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid("(body)", f"not UTF-8: byte {error.start} is no part of a character") from error
    try:
        value: JsonValue = json.loads(
            text, parse_constant=_constant, parse_float=_float, parse_int=_int, object_pairs_hook=_object
        )
        _check_text(value, "")
    except json.JSONDecodeError as error:
        raise invalid("(body)", f"not valid JSON: {error.msg}, line {error.lineno}") from error
    except RecursionError as error:
        raise invalid("(body)", "nested too deeply") from error
    return value


def invalid(field: str, message: str) -> Invalid:
    """An Invalid that names one field."""
    return Invalid(f"{field}: {message}", fields=[FieldProblem(field=field, message=message)])


def prefixed(error: Invalid, prefix: str) -> Invalid:
    """The same fault with its fields as the user wrote them, below `prefix`."""
    fields = [FieldProblem(field=f"{prefix}.{f.field}", message=f.message) for f in error.fields]
    return Invalid("; ".join(f"{f.field}: {f.message}" for f in fields) or error.message, fields=fields)


def _constant(text: str) -> NoReturn:
    raise invalid("(body)", f"{text} is no JSON number; every number must be finite")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise invalid("(body)", f"{text[:_SHOWN]} is too large for a number")
    return value


def _int(text: str) -> int:
    if len(text) > 32:
        raise invalid("(body)", f"{text[:16]}… is too large for a number")
    return int(text)


def _object(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    found: dict[str, JsonValue] = {}
    for key, value in pairs:
        if key in found:
            raise invalid(key[:_SHOWN], "this key occurs twice in one object")
        found[key] = value
    return found


def _check_text(value: JsonValue, path: str, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        raise invalid(path.split(".")[0][:_SHOWN], f"nested more than {_MAX_DEPTH} deep")
    if isinstance(value, str):
        if "\0" in value:
            raise invalid(path or "(body)", "holds a NUL character")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise invalid(path or "(body)", "holds a lone surrogate: not encodable as UTF-8") from error
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(key, path)
            _check_text(item, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_text(item, f"{path}.{index}", depth + 1)


def _known_keys(fields: list[FieldProblem], model: type[BaseModel]) -> list[FieldProblem]:
    """An unknown key of the body itself is told which ones exist."""
    known = ", ".join(model.model_fields)
    return [
        FieldProblem(field=f.field, message=f"unknown key; known: {known}")
        if f.message.startswith("unknown key") and "." not in f.field
        else f
        for f in fields
    ]


def _kind(value: JsonValue) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
