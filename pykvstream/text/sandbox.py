"""A jinja2 sandbox whose every operation is paid for and whose own text is marked.

jinja2 keeps a template from reaching Python; it does not keep it from running for ever or filling memory.
Here the syntax tree is rewritten before it is compiled, so that each loop round, macro call, comparison, key
and slice reports to a ``Budget``; operators, calls, filters and outputs pass through one method each; and
only the listed filters, tests, globals and methods exist.

Order: pay first, then work; an operation whose result could be large is sized before it is made.
Holds: ``budget`` belongs to one rendering at a time; the owner serializes.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from types import FunctionType
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace, pass_context

from pykvstream.errors import FormatError, InvalidArgument
from pykvstream.text.budget import MAX_INT_BITS, MAX_ITEMS, MAX_SOURCE_CHARS, MAX_WIDTH, Budget
from pykvstream.text.provenance import Marked, join, trusted

_FILTERS = (
    "abs", "attr", "batch", "capitalize", "count", "d", "default", "dictsort", "first", "float",
    "groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject",
    "rejectattr", "reverse", "round", "select", "selectattr", "slice", "sort", "sum", "title", "trim",
    "unique", "upper",
)  # fmt: skip
_DEEP_FILTERS = frozenset({"dictsort", "groupby", "max", "min", "sort", "sum", "unique"})
_STEPS_PER_ITEM = {
    "batch": 2, "dictsort": 6, "groupby": 6, "list": 2, "map": 2, "max": 4, "min": 4, "reject": 2, "rejectattr": 2,
    "reverse": 2, "select": 2, "selectattr": 2, "slice": 2, "sort": 6, "sum": 2, "title": 0.25, "unique": 4,
}  # fmt: skip
"""Filters that do more for an item, or a character, than to read it."""
_STEPS_PER_PIECE = 2
"""A piece that a string is cut into takes its marks along."""
_CUTTING = frozenset({"rsplit", "split", "splitlines"})
_SIZED_FILTERS = frozenset({"batch", "round", "slice", "sum"})
_TESTS = (
    "boolean", "callable", "defined", "divisibleby", "eq", "equalto", "even", "false", "filter",
    "float", "ge", "greaterthan", "gt", "in", "integer", "iterable", "le", "lessthan", "lower", "lt",
    "mapping", "ne", "none", "number", "odd", "sameas", "sequence", "string", "test", "true",
    "undefined", "upper", "==", "!=", "<", "<=", ">", ">=",
)  # fmt: skip
_COMPARING_TESTS = frozenset({
    "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lt", "ne", "==", "!=", "<",
    "<=", ">", ">=",
})  # fmt: skip
_STR_METHODS = frozenset({
    "capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha",
    "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join",
    "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
    "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title",
    "upper",
})  # fmt: skip
_METHODS: dict[type, frozenset[str]] = {
    str: _STR_METHODS,
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    LoopContext: frozenset({"changed", "cycle"}),
    Cycler: frozenset({"next", "reset"}),
}
_CALLABLES = (Macro, BlockReference, Joiner, Undefined)
_SCOPE_VARIABLES = ("_loop_vars", "_block_vars")
_FORBIDDEN = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*(?:\*|\d{4})")
_WIDE_SPEC = re.compile(r"\d{4}|[{}]")
_DATE_FORMAT = re.compile(r"(?:[^%]|%-?[a-zA-Z%])*")
_MAX_DATE_FORMAT = 256


class _OpaqueNamespace(Namespace):
    """A namespace that prints as its name: what it holds may be large, or itself."""

    def __repr__(self) -> str:
        return "<namespace>"


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks the model's turns for training; a prompt only has what is inside."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Generator(CodeGenerator):
    """Marks the template's text and sends ``~``, ``[a:b]`` and keys through the environment."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if type(node.value) is str:
            self.write(f"environment.own_text({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat_values((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own_text({''.join(group)!r})"


class PromptEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one template; set ``budget`` before each rendering."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlocks],
            optimized=False,
            cache_size=0,
            finalize=self._finalize,
        )
        self.budget = Budget(0, 0)
        self._own: dict[str, Marked] = {}
        self.globals = {
            "range": self._range,
            "namespace": self._namespace,
            "dict": self._dict,
            "cycler": self._cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self._globals = tuple(self.globals.values())
        self.tests = {name: self._reading(name, self.tests[name]) for name in _TESTS}
        filters = {name: self._metered(name, self.filters[name]) for name in _FILTERS}
        own: dict[str, Callable[..., Any]] = {
            "indent": self._indent,
            "join": self._join_filter,
            "replace": self._replace,
            "safe": self._as_text,
            "string": self._as_text,
            "tojson": self._tojson,
        }
        tree: dict[str, Callable[..., Any]] = {
            "$tick": self._tick,
            "$iterated": self._iterated,
            "$read": self._read,
            "$key": _key,
            "$made": self._made,
        }
        self.filters = {**filters, **own, **tree}

    # -- compiling ------------------------------------------------------------------------------------------

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE_CHARS:
            message = f"the chat template has {len(source)} characters"
            raise FormatError(f"{message}, at most {MAX_SOURCE_CHARS} may be")
        tree = super()._parse(source, name, filename)
        for forbidden in tree.find_all(_FORBIDDEN):
            kind = type(forbidden).__name__.lower()
            where = f"line {forbidden.lineno}"
            raise FormatError(f"the chat template uses {kind!r} in {where}: there is no other template")
        _instrument(tree)
        return tree

    def own_text(self, text: str) -> Marked:
        """Return a constant of the template with its marks."""
        marked = self._own.get(text)
        if marked is None:
            marked = self._own[text] = trusted(text)
        return marked

    # -- operators ------------------------------------------------------------------------------------------

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        budget.step()
        if isinstance(left, str) and operator == "%":
            return self._percent(left, right)
        if operator == "*":
            self._size_product(left, right)
        elif operator == "**":
            _size_power(left, right)
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            budget.chars(len(left) + len(right))
        elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
            budget.items(len(left) + len(right))
        value = super().call_binop(context, operator, left, right)
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise InvalidArgument(f"the chat template makes an integer of more than {MAX_INT_BITS} bits")
        return value

    def _size_product(self, left: Any, right: Any) -> None:
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str) and isinstance(times, int):
                self.budget.chars(len(sequence) * max(times, 0))
            elif isinstance(sequence, list | tuple) and isinstance(times, int):
                self.budget.items(len(sequence) * max(times, 0))

    def _percent(self, template: str, values: Any) -> str:
        if _WIDE_PERCENT.search(template):
            raise InvalidArgument("the chat template formats to a width of its own making")
        self.budget.walk(values)
        text = str.__mod__(template, values)
        self.budget.chars(len(text))
        return text

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a macro or a block wrote."""
        pieces = list(parts)
        self.budget.chars(sum(map(len, pieces)))
        return join("", pieces)

    def concat_values(self, values: Iterable[object]) -> str:
        """``a ~ b``: any values as text, joined."""
        return self.concat([self._as_text(value) for value in values])

    @pass_context
    def _finalize(self, _context: Context, value: object) -> str:
        text = self._as_text(value)
        self.budget.chars(len(text))
        return text

    def _as_text(self, value: object) -> str:
        if isinstance(value, str):
            self.budget.step()
            return value
        self.budget.walk(value)
        text = str(value)
        self.budget.chars(len(text))
        return text

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, _key(argument))

    # -- calls ----------------------------------------------------------------------------------------------

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what a template may call: its own macros, the globals, and the listed methods."""
        self, called = __self, __obj
        self.budget.step(4)
        if isinstance(called, LoopContext):
            for items in args:
                self.budget.items(len(items))
            self.budget.step(16 * sum(map(len, args)))
        elif isinstance(called, FunctionType) and hasattr(called, "__wrapped__"):
            self._size_format(called.__wrapped__, args, kwargs)
        elif not isinstance(called, _CALLABLES) and called not in self._globals:
            given = {name: value for name, value in kwargs.items() if name not in _SCOPE_VARIABLES}
            return self._call_method(called, args, given)
        return self._made(super().call(__context, called, *args, **kwargs))

    def _call_method(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
        if kind is None or name not in _METHODS[kind]:
            what = type(method).__name__ if owner is None else f"{(kind or type(owner)).__name__}.{name}"
            raise SecurityError(f"{what} cannot be called here")
        self.budget.touch(owner)
        self.budget.walk(args)
        self.budget.walk(kwargs)
        if isinstance(owner, str) and name == "join":
            return self._join(owner, *args, **kwargs)
        if isinstance(owner, str) and name == "replace":
            return self._replace(owner, *args, **kwargs)
        if kind in (list, tuple):
            self.budget.walk(owner)
        made = method(*args, **kwargs)
        if name in _CUTTING:
            self.budget.step(_STEPS_PER_PIECE * len(made))
        return self._made(made)

    def _size_format(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if method.__name__ != "format":
            raise SecurityError(f"str.{method.__name__} cannot be called here")
        for _, _, spec, _ in string.Formatter().parse(method.__self__):
            if spec and _WIDE_SPEC.search(spec):
                raise InvalidArgument("the chat template formats to a width of its own making")
        # A field may be named any number of times, and each time is the whole value again.
        for _ in range(1 + method.__self__.count("{")):
            self.budget.walk(args)
            self.budget.walk(kwargs)
            self.budget.chars(sum(len(a) for a in (*args, *kwargs.values()) if isinstance(a, str)))

    def _made(self, value: Any) -> Any:
        """Size a value that an operation gave back; iterators and views become lists."""
        if isinstance(value, str):
            self.budget.chars(len(value))
        elif isinstance(value, list | tuple | dict):
            self.budget.items(len(value))
        elif isinstance(value, Iterator | type({}.keys()) | type({}.values()) | type({}.items())):
            return self._listed(value)
        return value

    def _listed(self, values: Iterable[Any]) -> list[Any]:
        made = []
        for value in values:
            self.budget.step()
            made.append(value)
        self.budget.items(len(made))
        return made

    # -- globals --------------------------------------------------------------------------------------------

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        # ``len`` of a range beyond the machine's word raises; the ends tell without it.
        if numbers and (abs(numbers[-1] - numbers[0]) // abs(numbers.step)) >= MAX_ITEMS:
            raise InvalidArgument(f"the chat template asks for a range of more than {MAX_ITEMS} numbers")
        return numbers

    def _namespace(self, *args: Any, **kwargs: Any) -> Namespace:
        self.budget.walk(args)
        return _OpaqueNamespace(*args, **kwargs)

    def _dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        self.budget.walk(args)
        return dict(*args, **kwargs)

    def _cycler(self, *items: Any) -> Cycler:
        return Cycler(*items)

    # -- filters --------------------------------------------------------------------------------------------

    def _reading(self, name: str, test: Any) -> Callable[..., Any]:
        is_deep = name in _COMPARING_TESTS

        def reading(*values: Any) -> Any:
            for value in values:
                self._read(value) if is_deep else self.budget.touch(value)
            return test(*values)

        return reading

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        deep = name in _DEEP_FILTERS
        takes_state = hasattr(function, "jinja_pass_arg")
        per_item = _STEPS_PER_ITEM.get(name, 0)

        def metered(*args: Any, **kwargs: Any) -> Any:
            values = args[1:] if takes_state else args
            for value in values:
                self.budget.walk(value) if deep else self.budget.touch(value)
            if per_item and values and hasattr(values[0], "__len__"):
                self.budget.step(int(per_item * len(values[0])))
            for option in (*values[1:], *kwargs.values()) if name in _SIZED_FILTERS else ():
                too_wide = isinstance(option, int) and abs(option) > MAX_WIDTH
                if too_wide or isinstance(option, list | tuple):
                    raise InvalidArgument(f"filter {name!r}: an option is a list or beyond {MAX_WIDTH}")
            return self._made(function(*args, **kwargs))

        if takes_state:
            metered.__dict__["jinja_pass_arg"] = function.__dict__["jinja_pass_arg"]
        return metered

    def _join_filter(self, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        items = self._listed(values)
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        return self._join(d, [self._as_text(item) for item in items])

    def _join(self, separator: str, parts: Iterable[str]) -> str:
        pieces = self._listed(parts)
        self.budget.chars(sum(map(len, pieces)) + len(separator) * max(len(pieces) - 1, 0))
        return join(separator, pieces)

    def _replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        owner = self._as_text(text)
        self.budget.touch(owner)
        times = owner.count(old)
        if count is not None and count >= 0:
            times = min(times, count)
        self.budget.chars(len(owner) + times * (len(new) - len(old)))
        if not times:
            return owner
        self.budget.step(_STEPS_PER_PIECE * times)
        return join(new, owner.split(old, times)) if old else str.replace(owner, old, new, times)

    def _indent(self, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        by = width if isinstance(width, str) else trusted(" " * min(max(width, 0), MAX_WIDTH))
        lines = self._as_text(text).split("\n")
        self.budget.items(len(lines))
        skip = 0 if first else 1
        indented = [by + line if i >= skip and (line or blank) else line for i, line in enumerate(lines)]
        return self._join("\n", indented)

    def _tojson(
        self, value: Any, ensure_ascii: bool = False, indent: int | None = None,
        separators: Sequence[str] | None = None, sort_keys: bool = False,
    ) -> str:  # fmt: skip
        if indent is not None and not 0 <= indent <= MAX_WIDTH:
            raise InvalidArgument(f"tojson: an indent of {indent} is not within 0..{MAX_WIDTH}")
        self.budget.walk(value)
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys,
            separators=None if separators is None else (separators[0], separators[1]),
        )  # fmt: skip
        parts = []
        for part in encoder.iterencode(value):
            self.budget.chars(len(part))
            parts.append(part)
        return "".join(parts)

    # -- what the rewritten tree calls ----------------------------------------------------------------------

    def _tick(self, n_nodes: int) -> None:
        self.budget.step(n_nodes)

    def _iterated(self, items: Any, n_nodes: int) -> Any:
        if isinstance(items, Undefined):
            return items
        values = self._made(items)
        self.budget.step(len(values) * n_nodes)
        return values

    def _read(self, value: Any) -> Any:
        self.budget.touch(value) if isinstance(value, str) else self.budget.walk(value)
        return value


def _key(value: Any) -> Any:
    if isinstance(value, tuple):
        raise TemplateRuntimeError("a tuple cannot be a key here")
    return value


def _raise_exception(message: object) -> NoReturn:
    raise InvalidArgument(f"the chat template refuses these messages: {str(message)[:2000]}")


def _strftime_now(format: str) -> str:
    if len(format) > _MAX_DATE_FORMAT or not _DATE_FORMAT.fullmatch(format):
        raise InvalidArgument("the chat template's date format is not a plain one")
    return datetime.now().strftime(format)


def _size_power(base: Any, exponent: Any) -> None:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and base.bit_length() * abs(exponent) > MAX_INT_BITS:
        raise InvalidArgument(f"the chat template makes an integer of more than {MAX_INT_BITS} bits")


def _filter(name: str, node: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _instrument(tree: nodes.Template) -> None:
    """Make loops, macros, comparisons, keys and slices report, by wrapping them in the ``$`` filters."""
    bodies = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)
    owner: Any
    for owner in list(tree.find_all(bodies)):
        n_nodes = 1 + _count(owner) // 4
        tick = nodes.ExprStmt(_filter("$tick", nodes.Const(n_nodes)))
        owner.body.insert(0, tick)
    loop: Any
    for loop in list(tree.find_all(nodes.For)):
        n_nodes = 0 if loop.test is None else 1 + _count(loop.test)
        loop.iter = _filter("$iterated", loop.iter, nodes.Const(n_nodes))
    for compare in list(tree.find_all(nodes.Compare)):
        compare.expr = _filter("$read", compare.expr)
        for operand in compare.ops:
            operand.expr = _filter("$read", operand.expr)
    for pair in list(tree.find_all(nodes.Pair)):
        pair.key = _filter("$key", pair.key)
    _wrap_slices(tree)


def _count(node: nodes.Node) -> int:
    return 1 + sum(_count(child) for child in node.iter_child_nodes())


def _wrap_slices(node: nodes.Node) -> None:
    for field, value in node.iter_fields():
        children: Sequence[Any] = value if isinstance(value, list) else [value]
        wrapped = [_filter("$made", c) if _is_slice(c) else c for c in children]
        setattr(node, field, wrapped if isinstance(value, list) else wrapped[0])
        for child in children:
            if isinstance(child, nodes.Node):
                _wrap_slices(child)


def _is_slice(node: object) -> bool:
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice) and node.ctx == "load"
