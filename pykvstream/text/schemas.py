"""Which JSON kinds a tool's parameter may have, and a written value as JSON text.

The model writes every value as plain text between two tags: only the tool's schema tells whether ``5`` is a number
or a string.
Source: spec/model.md 7.4. What a schema leaves open may be anything, a string too.
Holds: schemas come with a request and may refer to themselves: a reference is followed once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from pykvstream.errors import InvalidArgument

Kinds = frozenset[str]
ANY: Kinds = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
STRING: Kinds = frozenset({"string"})

_JSON_SPACE = " \t\r\n"
_MAX_DEPTH = 32
_MAX_DIGITS = 64
_SURROGATE = re.compile("[\ud800-\udfff]")


class ToolSchemas:
    """The parameters of each tool of a request; see ``kinds``.

    ``tools``: mappings with ``name`` and ``parameters``, or with those inside ``function``. Raises
    ``InvalidArgument`` naming the tool that has no name.
    """

    __slots__ = ("_tools",)

    def __init__(self, tools: Sequence[Mapping[str, object]]) -> None:
        if isinstance(tools, str) or not isinstance(tools, Sequence):
            raise InvalidArgument(f"tools must be a sequence of mappings, have {type(tools).__name__}")
        self._tools: dict[str, Mapping[str, object]] = {}
        for i, tool in enumerate(tools):
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
                raise InvalidArgument(f"tools[{i}] must be a mapping with a name, or with a function that has one")
            parameters = function.get("parameters")
            self._tools[name] = parameters if isinstance(parameters, Mapping) else {}

    def kinds(self, tool: str, parameter: str) -> Kinds:
        """The kinds that a parameter may have; everything where nothing is said about it."""
        root = self._tools.get(tool, {})
        properties = root.get("properties")
        if isinstance(properties, Mapping) and parameter in properties:
            return _Reader(root).kinds(properties[parameter])
        return _Reader(root).kinds(root.get("additionalProperties"))


class _Reader:
    """Reads one schema; remembers the references it is following."""

    def __init__(self, root: Mapping[str, object]) -> None:
        self._root = root
        self._found: dict[str, Kinds] = {}

    def kinds(self, schema: object, depth: int = 0) -> Kinds:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return ANY
        allowed = _named(schema.get("type")) & _of_values(schema)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            allowed &= self._referred(reference, depth)
        for key in ("anyOf", "oneOf"):
            branches = schema.get(key)
            if isinstance(branches, list | tuple) and branches:
                allowed &= frozenset[str]().union(*(self.kinds(branch, depth + 1) for branch in branches))
        branches = schema.get("allOf")
        for branch in branches if isinstance(branches, list | tuple) else ():
            allowed &= self.kinds(branch, depth + 1)
        # A schema that nothing can satisfy says nothing about how the value was written.
        return allowed or ANY

    def _referred(self, reference: str, depth: int) -> Kinds:
        if reference not in self._found:
            self._found[reference] = ANY
            self._found[reference] = self.kinds(self._pointed_at(reference), depth + 1)
        return self._found[reference]

    def _pointed_at(self, reference: str) -> object:
        head, *names = reference.split("/")
        here: object = self._root if head == "#" else None
        for name in names:
            here = here.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(here, Mapping) else None
        return here


def _named(kind: object) -> Kinds:
    names = [kind] if isinstance(kind, str) else kind
    if not isinstance(names, list | tuple):
        return ANY
    known = frozenset(name for name in names if isinstance(name, str)) & ANY
    if "number" in known:
        known |= {"integer"}
    return known or ANY


def _of_values(schema: Mapping[str, object]) -> Kinds:
    """The kinds of the values that ``enum`` or ``const`` list."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list | tuple):
        return ANY
    return frozenset(map(_kind, values)) or ANY


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "number"
        case Mapping():
            return "object"
        case _:
            return "array"


class _Integer(int):
    """Where a number was written without a fraction; its value is not looked at."""


def _integer(text: str) -> object:
    if len(text) > _MAX_DIGITS:
        raise ValueError("a number too long to be read back")
    return _Integer()


def _real(text: str) -> object:
    if len(text) > _MAX_DIGITS or not math.isfinite(float(text)):
        raise ValueError("a number that cannot be read back")
    return 0.0


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_PARSE: Callable[[str], object] = json.JSONDecoder(
    parse_float=_real, parse_int=_integer, parse_constant=_refuse
).decode


def json_text(text: str, kinds: Kinds) -> str:
    """The JSON text of a value that was written as ``text`` where ``kinds`` are allowed.

    A value that must be a string is its text. Otherwise what parses as JSON stands as it was written, unless a
    string is allowed and that kind is not; all else becomes a string, so that arguments are always JSON, and JSON
    that goes back into a prompt: not nested without end, no number beyond reason, no half of a character.
    """
    if kinds != STRING:
        bare = text.strip(_JSON_SPACE)
        kind = _parsed_kind(bare)
        if kind is not None and ("string" not in kinds or kind in kinds - STRING):
            return bare
    return json.dumps(text, ensure_ascii=False)


def _parsed_kind(text: str) -> str | None:
    try:
        value = _PARSE(text)
    except (ValueError, RecursionError):
        return None
    return _kind(value) if _is_plain(value, 0) else None


def _is_plain(value: object, depth: int) -> bool:
    if isinstance(value, str):
        return _SURROGATE.search(value) is None
    if isinstance(value, dict):
        return depth < _MAX_DEPTH and all(_is_plain(k, depth) and _is_plain(v, depth + 1) for k, v in value.items())
    if isinstance(value, list):
        return depth < _MAX_DEPTH and all(_is_plain(v, depth + 1) for v in value)
    return True
