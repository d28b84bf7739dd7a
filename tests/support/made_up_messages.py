"""Messages of any protobuf type, made up by hypothesis: each field missing, ordinary, or at the edge of its type."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

MAX_DEPTH = 4
MAX_ITEMS = 3

_EDGES = [0, 1, 2, 16, 127, 128, 129, 2**16, 2**31 - 1]
_TEXTS = st.text(max_size=20) | st.sampled_from(
    ["", "x", "\x00", "é" * 200, "user", "system", "bytes", "𝒳" * 50, "{{", "a" * 3_000]
)
_FLOATS = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 1e-9, 2.0, 1e30]), st.floats(width=32))
_BY_KIND = {
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from([*_EDGES, -1, -(2**31)]),
    FieldDescriptor.CPPTYPE_INT64: st.sampled_from([*_EDGES, -1, -(2**63), 2**63 - 1]),
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([*_EDGES, 2**32 - 1]),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from([*_EDGES, 2**64 - 1]),
    FieldDescriptor.CPPTYPE_DOUBLE: _FLOATS,
    FieldDescriptor.CPPTYPE_FLOAT: _FLOATS,
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 6),
}


def messages(kind: Descriptor, depth: int = 0) -> st.SearchStrategy[Message]:
    """Of one of a oneof's fields the last that is set stays, as on the wire."""
    fields = [field for field in kind.fields if depth < MAX_DEPTH or field.message_type is None]
    values = {field.name: st.none() | _values(field, depth) for field in fields}
    return st.fixed_dictionaries(values).map(lambda chosen: _build(kind, chosen))


def _build(kind: Descriptor, chosen: dict[str, Any]) -> Message:
    return GetMessageClass(kind)(**{name: value for name, value in chosen.items() if value is not None})


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        keys, values = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return st.dictionaries(_single(keys, depth), _single(values, depth), max_size=MAX_ITEMS)
    single = _single(field, depth)
    return st.lists(single, max_size=MAX_ITEMS) if field.is_repeated else single


def _single(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, depth + 1)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _TEXTS
    return _BY_KIND[field.cpp_type]
