"""Bounds on the work and the memory of a chat template, which is foreign code and could run for ever.

A rendering has a budget. Each turn of a loop and each call of a macro or block costs some of it, each string or list
that is made its length. What multiplies lengths is checked before it is done. The budget grows with the messages, so
that no conversation that fits in a model's context meets it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

if TYPE_CHECKING:
    from collections.abc import Iterator

_BUDGET = 64 << 20
_PER_CHAR = 32
"""What a character of the messages adds to the budget."""
_TURN_COST = 128
_CALL_COST = 512
_ITEM_COST = 32
_MOST_NUMBER = 1_000_000
"""Largest number that a function or filter gets: most are widths, or lengths."""
_MOST_BITS = 4096
_LONG_NUMBER = re.compile(r"\d{7}")
_STEP = "baton_step"
_JOINED = "baton_joined"
_DEEP = frozenset({"tojson", "string", "join", "pprint", "format", "unique", "sort"})
"""Filters whose work is that of all that their input contains."""


class TemplateWorkError(jinja2.TemplateError):
    """A template does more work, or makes more text, than a prompt needs."""

    def __init__(self) -> None:
        super().__init__("it does more work, or makes more text, than a prompt needs")


class _Budget:
    def __init__(self, left: int) -> None:
        self.left = left

    def charge(self, amount: int) -> None:
        if amount > self.left:
            self.left = 0
            raise TemplateWorkError
        self.left -= amount


_CURRENT: ContextVar[_Budget] = ContextVar("budget of a chat template")


@contextmanager
def bounded_work(num_chars: int) -> Iterator[Callable[[int], None]]:
    """Give a template that is rendered within a budget; yields a function that charges it.

    Args:
        num_chars: Characters of the messages.
    """
    budget = _Budget(_BUDGET + _PER_CHAR * num_chars)
    token = _CURRENT.set(budget)
    try:
        yield budget.charge
    finally:
        _CURRENT.reset(token)


def _charge(amount: int) -> None:
    _CURRENT.get().charge(amount)  # at compile time there is none: then jinja leaves a constant for the rendering


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox whose templates render within :func:`bounded_work`; made by :meth:`bounded`, after its filters are."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_finalize, **options)
        del self.globals["lipsum"]
        self.globals["range"] = _range
        self.concat = _concat  # type: ignore[method-assign]  # of the pieces of a macro, or of a block that is set

    def bounded(self, source: str) -> jinja2.Template:
        """Compile a template whose loops, macros and filters are counted."""
        self.filters.update({name: _counted(name, each) for name, each in self.filters.items()})
        self.filters[_STEP] = _charge
        self.filters[_JOINED] = _joined
        tree = _Counting().visit(self.parse(source))
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or a method, within the budget."""
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        if isinstance(owner, (str, list, tuple, dict)):
            _check_call(name, owner, (*args, *kwargs.values()))
        elif name in ("format", "format_map"):  # jinja's own, which hides its string
            _check_call("format", getattr(getattr(function, "__wrapped__", None), "__self__", ""), (args, kwargs))
        value = super().call(context, function, *args, **kwargs)
        _charge(_length(value))
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left operator right``, within the budget."""
        if operator == "%":
            if isinstance(left, str):
                _check_call("format", left, (right,))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(1, right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MOST_BITS:
                raise TemplateWorkError
        elif operator == "+":
            _charge(_length(left) + _length(right))
        elif operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    _charge(_length(sized) * max(0, times))
        return super().call_binop(context, operator, left, right)


class _Counting(jinja2.visitor.NodeTransformer):
    """Adds a step to each body that may run many times, and joins strings by a filter that knows the budget."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        return self._count(node, _TURN_COST)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        return self._count(node, _CALL_COST)

    visit_CallBlock = visit_Block = visit_Macro

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        parts = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return _filter(parts, _JOINED)

    def _count(self, node: Any, cost: int) -> jinja2.nodes.Node:
        self.generic_visit(node)
        step = _filter(jinja2.nodes.Const(cost, lineno=node.lineno), _STEP)
        node.body.insert(0, jinja2.nodes.ExprStmt(step, lineno=node.lineno))
        return node  # type: ignore[no-any-return]


def _filter(node: jinja2.nodes.Expr, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _range(*args: int) -> range:
    numbers = jinja2.sandbox.safe_range(*args)
    _charge(len(numbers))
    return numbers


def _finalize(value: Any) -> Any:
    """Charge a value that is written, unless it is text, which counts where it goes."""
    if isinstance(value, (list, tuple, dict)):
        _charge_deep(value)
    return value


def _concat(pieces: Iterable[str]) -> str:
    pieces = list(pieces)
    _charge(sum(map(len, pieces)))
    return "".join(pieces)


def _joined(parts: list[Any]) -> str:
    """Return the strings of some values, one after the other."""
    for part in parts:
        _finalize(part)
    return _concat([str(part) for part in parts])


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0  # its context or environment

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        value, *others = args[skip:]
        if name in _DEEP:
            value = list(value) if name == "join" and not isinstance(value, (str, dict)) else value
            _charge_deep(value)
        _check_call(name, value, (*others, *kwargs.values()))
        result = function(*args[:skip], value, *others, **kwargs)
        _charge(_length(result))
        return result

    return counted


def _check_call(name: str, value: Any, args: tuple[Any, ...]) -> None:
    """Charge what a function reads, and refuse one whose result would be much larger."""
    _charge(_length(value))
    for each in args:
        if isinstance(each, int) and abs(each) > _MOST_NUMBER:
            raise TemplateWorkError
    most = max((abs(x) if isinstance(x, int) else _length(x) for x in args), default=0)
    if name == "replace" and len(args) > 1 and isinstance(value, str) and isinstance(args[0], str):
        _charge(value.count(args[0]) * _length(args[1]))
    elif name == "join":
        pieces, separator = (args[0], value) if isinstance(value, str) and args else (value, args[0] if args else "")
        if isinstance(pieces, (list, tuple)):
            _charge(sum(map(_length, pieces)) + len(pieces) * _length(separator))
    elif name in ("indent", "expandtabs", "wordwrap") and isinstance(value, str):
        _charge((value.count("\n") + value.count("\t") + len(value) * (name == "wordwrap")) * most)
    elif name == "translate":
        raise TemplateWorkError
    elif name in ("center", "ljust", "rjust", "zfill"):
        _charge(most)
    elif name == "tojson" and args:
        _charge(_deep_length(value) * most)
    elif name == "format" and isinstance(value, str):
        if _LONG_NUMBER.search(value):
            raise TemplateWorkError
        _charge((value.count("%") + value.count("{")) * max(_deep_length(args), most))


def _length(value: object) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 0


def _charge_deep(value: object) -> None:
    _charge(_deep_length(value))


def _deep_length(value: object) -> int:
    """Return the length of a value and of all that it contains, however often.

    Raises:
        TemplateWorkError: It is beyond the budget.
    """
    most = _CURRENT.get().left
    total = 0
    left = [value]
    while left:
        each = left.pop()
        total += _ITEM_COST + _length(each)
        if total > most:
            raise TemplateWorkError
        if isinstance(each, dict):
            left.extend(each)
            left.extend(each.values())
        elif isinstance(each, (list, tuple)):
            left.extend(each)
        elif isinstance(each, int):
            total += each.bit_length() // 3
    return total
