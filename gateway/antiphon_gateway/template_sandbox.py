"""Where chat templates run: Jinja's immutable sandbox, with limits on time and on what is made.

A template comes with a model, and whoever made the model may have meant harm or have made a mistake. Jinja's sandbox
keeps it from the interpreter's insides; what it does not bound is bounded here. Each iteration of a loop and each call
of a macro looks at how much processor time this rendering has taken. Each operation that may make a text or list much
larger than what it was given pays for the result from an allowance before it is done (`template_allowance`), so that
no short template can fill the memory, neither while it is rendered nor while Jinja works out constants to compile it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.exceptions
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

from antiphon_gateway import template_allowance as allowance


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Writes a look at the clock into bodies of loops and macros, and joins texts within the allowance."""

    _macro_begins = False

    def blockvisit(self, nodes: Iterable[jinja2.nodes.Node], frame: jinja2.compiler.Frame) -> None:
        if frame.loop_frame or self._macro_begins:
            self._macro_begins = False
            self.writeline("environment.tick()")
        super().blockvisit(nodes, frame)

    def macro_body(
        self, node: jinja2.nodes.Macro | jinja2.nodes.CallBlock, frame: jinja2.compiler.Frame
    ) -> tuple[jinja2.compiler.Frame, jinja2.compiler.MacroRef]:
        self._macro_begins = True
        return super().macro_body(node, frame)

    def visit_Add(self, node: jinja2.nodes.BinExpr, frame: jinja2.compiler.Frame) -> None:  # noqa: N802  # Jinja's name
        """A whole sum in one call: nearly all of what templates do is joining texts with `+`."""
        terms: list[jinja2.nodes.Expr] = []
        left: jinja2.nodes.Expr = node
        while isinstance(left, jinja2.nodes.Add):
            terms.append(left.right)
            left = left.left
        self.write("environment.added((")
        for term in (left, *reversed(terms)):
            self.visit(term, frame)
            self.write(", ")
        self.write("))")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802  # Jinja's name
        self.write("environment.joined((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of one template. Many threads may render in it, each after `allowance.begin`."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"*", "**", "%"})
    tick = staticmethod(allowance.tick)
    added = staticmethod(allowance.added)
    joined = staticmethod(allowance.joined)

    def __init__(self, extensions: Sequence[type[jinja2.ext.Extension]]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_written)
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = _Dict()
        del self.globals["lipsum"]
        self.filters.update(_FILTERS)
        self.binop_table.update({"*": allowance.multiply, "**": allowance.power, "%": allowance.modulo})

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _BYTES and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja shows it each method that a template reaches for, to replace those that need care."""
        if not isinstance(value, types.BuiltinMethodType | types.MethodType) or not isinstance(value.__self__, str):
            return None
        price = _PRICES.get(value.__name__)
        return None if price is None else _paid(value.__self__, super().wrap_str_format(value) or value, price)


class _Namespace(jinja2.utils.Namespace):
    """As in `transformers`: names that begin with an underscore are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name in the namespace
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _public(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)


def _public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no place for {name!r}")


class _Dict:
    """As in `transformers`: `dict` by what templates do with it, and not the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _written(value: Any) -> Any:
    """Of each expression that is written: a block, or a macro's caller, may collect it."""
    if not isinstance(value, str) or len(value) > allowance.FREE:
        allowance.pay(allowance.weight(value))
    return value


# -- methods of texts whose result may be much longer than the text


def _paid(text: str, method: Callable[..., Any], price: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def paid(*args: Any, **kwargs: Any) -> Any:
        price(text, *args, **kwargs)
        return method(*args, **kwargs)

    return paid


def _price_of_width(text: str, width: Any = 0, *_: Any) -> None:
    allowance.pay(width if isinstance(width, int) else 0)


def _price_of_tabs(text: str, tabsize: Any = 8) -> None:
    allowance.pay(text.count("\t") * tabsize if isinstance(tabsize, int) else 0)


def _price_of_replacing(text: str, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    if isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        allowance.pay(text.count(old) * (len(new) - len(old)))


def _price_of_joining(text: str, values: Any = ()) -> None:
    if isinstance(values, list | tuple | str | dict):
        allowance.pay(len(text) * len(values) + allowance.weight(values))


def _price_of_format(text: str, *args: Any, **kwargs: Any) -> None:
    allowance.pay_format(text, (*args, *kwargs.values()))


def _price_of_map(text: str, values: Any = None) -> None:
    allowance.pay_format(text, tuple(values.values()) if isinstance(values, dict) else ())


def _price_of_translating(text: str, table: Any = None) -> None:
    if isinstance(table, dict):
        allowance.pay(len(text) * max((len(value) for value in table.values() if isinstance(value, str)), default=1))


_PRICES: dict[str, Callable[..., None]] = {
    "center": _price_of_width,
    "ljust": _price_of_width,
    "rjust": _price_of_width,
    "zfill": _price_of_width,
    "expandtabs": _price_of_tabs,
    "replace": _price_of_replacing,
    "join": _price_of_joining,
    "format": _price_of_format,
    "format_map": _price_of_map,
    "translate": _price_of_translating,
}


_BYTES = frozenset({"encode", "to_bytes"})
"""What these make is no text, and would not be counted."""


# -- filters, likewise


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    values = list(value)
    if attribute is not None:
        values = list(map(jinja2.filters.make_attrgetter(environment, attribute), values))
    _price_of_joining(str(d), values)
    return str(d).join(map(str, values))


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = _text(s), _text(old), _text(new)
    _price_of_replacing(text, old, new)
    return text.replace(old, new, -1 if count is None else count)


def _center(value: Any, width: int = 80) -> str:
    _price_of_width("", width)
    return _text(value).center(width)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = _text(s)
    allowance.pay((text.count("\n") + 2) * (width if isinstance(width, int) else len(width)))
    return jinja2.filters.do_indent(text, width, first, blank)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    _price_of_format(_text(value), *args, **kwargs)
    return jinja2.filters.do_format(_text(value), *args, **kwargs)


@jinja2.pass_environment
def _wordwrap(environment: jinja2.Environment, s: Any, *args: Any, wrapstring: Any = None, **kwargs: Any) -> str:
    text = _text(s)
    allowance.pay(len(text) * max((len(value) for value in (*args, wrapstring) if isinstance(value, str)), default=1))
    if wrapstring is not None:
        kwargs["wrapstring"] = wrapstring
    return jinja2.filters.do_wordwrap(environment, text, *args, **kwargs)


def _batch(value: Any, linecount: int, fill_with: Any = None) -> Any:
    allowance.pay(linecount)
    return jinja2.filters.do_batch(value, linecount, fill_with)


def _slice(value: Any, slices: int, fill_with: Any = None) -> Any:
    allowance.pay(slices)
    return jinja2.filters.sync_do_slice(value, slices, fill_with)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    allowance.pay(allowance.weight(value))
    return str(value)


def _weighed(name: str) -> Callable[..., Any]:
    """A filter of Jinja's that writes as a text whatever it is given, which may be a list that holds itself often."""
    function = jinja2.filters.FILTERS[name]

    @functools.wraps(function)  # also the mark of those that take the environment first
    def weighed(*args: Any, **kwargs: Any) -> Any:
        for argument in args:
            if isinstance(argument, list | tuple | dict):
                allowance.pay(allowance.weight(argument))
        return function(*args, **kwargs)

    return weighed


_WRITING = (
    *("capitalize", "e", "escape", "forceescape", "lower", "pprint", "safe", "striptags", "title", "trim"),
    *("truncate", "upper", "urlencode", "urlize", "wordcount", "xmlattr"),
)
_FILTERS: dict[str, Callable[..., Any]] = {
    **{name: _weighed(name) for name in _WRITING},
    "batch": _batch,
    "center": _center,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "slice": _slice,
    "string": _text,
    "wordwrap": _wordwrap,
}
