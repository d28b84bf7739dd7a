"""Random JSON schemas of what people use: the same seed gives the same one. Every answer to one is short."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

NAMES = ("id", "name", "ok", "tags", "größe", "a b", "x-1", "$v")
PATTERNS = ("^[a-f]{2,4}$", "^(yes|no)$", "^[0-9]{2}-[A-Z]$", "^$|^x+y$")


def random_schema(seed: int) -> Schema:
    draw = random.Random(seed)
    return _object(draw, 0)


def _any(draw: random.Random, depth: int) -> Schema:
    leaves = (_string, _integer, _number, _constant)
    if depth >= 3:
        return draw.choice(leaves)(draw, depth)
    return draw.choice((*leaves, _object, _array, _either))(draw, depth + 1)


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(NAMES, draw.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _any(draw, depth) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    return {"type": "array", "items": _any(draw, depth), "minItems": least, "maxItems": least + draw.randint(0, 2)}


def _either(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(draw, depth) for _ in range(draw.randint(1, 3))]}


def _string(draw: random.Random, _: int) -> Schema:
    if draw.random() < 0.3:
        return {"type": "string", "pattern": draw.choice(PATTERNS)}
    least = draw.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 8)}


def _integer(draw: random.Random, _: int) -> Schema:
    least = draw.randint(-1000, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 500)}


def _number(draw: random.Random, _: int) -> Schema:
    return {"type": "number", "minimum": draw.randint(-50, 0), "exclusiveMaximum": draw.randint(1, 50)}


def _constant(draw: random.Random, _: int) -> Schema:
    values = [None, True, False, 7, -1.5, "", "ü\n", 'quote " and \\', [1, "a"], {"k": 0}]
    if draw.random() < 0.5:
        return {"enum": draw.sample(values, draw.randint(1, 4))}
    return draw.choice(({"const": draw.choice(values)}, {"type": ["boolean", "null"]}, {"type": "integer"}))
