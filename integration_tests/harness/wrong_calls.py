"""Wrong values for every argument of a package's public interface, by its annotation.

``Interface`` reads a package's ``api.txt`` and makes, for every public function, class
and method, calls with one wrong argument and the others valid: of a pool of values of
all kinds, those that the argument's annotation excludes. Each must be refused with a
TypeError or ValueError that the docstring announces, in a message that names the
argument, shows what came and says what was wanted.
What no annotation can say, as that a count begins at 1, is in a table of each package.
"""

import collections.abc
import dataclasses
import importlib
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import pytest
import tensorflow as tf

PACKAGES = Path(__file__).parents[2] / "packages"
LINE = re.compile(r"(?:class|def) ([\w.]+)\(")
NOTHING = inspect.Parameter.empty


class Stranger:
    """An object that nothing asks for."""

    def __repr__(self) -> str:
        return "Stranger()"


POOL = (None, True, 3, 2.5, math.nan, "nonsense", [3], {"nonsense": 3}, Stranger())
# What a message says that it wanted, by the annotation; of others, that it wanted any.
WANTED = {
    bool: "must be True or False",
    collections.abc.Callable: "must be a (function|name or a reducer)",
    int: "must be (an int|(a |the )?(whole )?numbers?)",
    float: "must be (a number|a real number|finite|seconds)",
}
WANTED_ANY = (
    r"\b(must|unknown|known are|(is|are) not|is neither|wants|needs|has no|[Oo]nly)\b"
)


def fits(value: Any, annotation: Any) -> bool:
    """Returns whether a value is of an annotated kind; unknown kinds take all."""
    kind, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if kind in (typing.Union, types.UnionType):
        return any(fits(value, argument) for argument in arguments)
    if kind is typing.Literal:
        return value in arguments
    if annotation in (None, NoneType):
        return value is None
    if annotation is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and not math.isnan(value)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    kind = kind or annotation
    is_class = isinstance(kind, type) and kind is not Any
    if not is_class or getattr(kind, "_is_protocol", False):
        return True
    if issubclass(kind, collections.abc.Mapping):
        return isinstance(value, kind)
    if issubclass(kind, collections.abc.Iterable) and arguments:
        items = arguments[0]
        is_list = isinstance(value, list | tuple)
        return is_list and all(fits(item, items) for item in value)
    return isinstance(value, kind)


def wanted(annotation: Any) -> str:
    """Returns a pattern of what a message may say that it wanted."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if is_union else (annotation,)
    kinds = [typing.get_origin(kind) or kind for kind in kinds if kind is not NoneType]
    patterns = [WANTED.get(kind, WANTED_ANY) for kind in kinds]
    return patterns[0] if len(patterns) == 1 else WANTED_ANY


class WrongCall(NamedTuple):
    """A call that must be refused with a clear message."""

    name: str  # of what is called, as in ``"Tower.scope"``
    call: Callable[[], Any]
    error: type[Exception]
    says: str  # in the message: the value passed, or what was expected


class Argument(NamedTuple):
    """An argument of a public function, class or method."""

    function: str  # as in ``WrongCall.name``
    name: str
    annotation: Any
    doc: str

    def __str__(self) -> str:
        return f"{self.function}.{self.name}"


class Late:
    """A value that is made for each call, as a tensor of the graph then current."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


def in_graph(_: object = None) -> AbstractContextManager[Any]:
    """The context of calls that build: a graph of their own."""
    return tf.Graph().as_default()


class Interface:
    """The public interface of a package, and valid arguments for all of it.

    Args:
      package: as in ``"tw-core"``.
      given: makes valid arguments, by name or by ``"function.name"``, and the objects
        whose methods are called, by class; what lacks here has a default, or is made
        of the arguments of its class.
      around: returns the context of a call, given its name; by default a graph.
      named: what messages call an argument, where that is not its name; by
        ``".name"`` or ``"function.name"``.
      exempt: why functions and arguments, their names with blanks between them, are
        passed no wrong value.
      calls: what to call in place of a function, as to use what it returns.
      without: modules of which other tests read the messages.
      internal: whether the names that siblings import are called, too.
    """

    def __init__(
        self,
        package: str,
        given: Mapping[str, Callable[[], Any]],
        around: Callable[[str], AbstractContextManager[Any]] = in_graph,
        named: Mapping[str, str] | None = None,
        exempt: Mapping[str, str] | None = None,
        calls: Mapping[str, Callable[..., Any]] | None = None,
        without: tuple[str, ...] = (),
        internal: bool = False,
    ) -> None:
        self.package, self.given, self.around = package, given, around
        self.internal = internal
        self.named, self.calls, self.without = named or {}, calls or {}, without
        self.exempt = {
            name for names in (exempt or {}).values() for name in names.split()
        }

    @cached_property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The public functions, classes and methods by name, each once."""
        found: dict[str, Callable[..., Any]] = {}
        lines = (PACKAGES / self.package / "api.txt").read_text().splitlines()
        if self.internal:
            face = PACKAGES / self.package / "internal.txt"
            lines += face.read_text().splitlines()
        for match in filter(None, map(LINE.match, lines)):
            if match[1].startswith(self.without):
                continue
            owner, name, value = _find(match[1])
            if _is_bare(owner) or _is_bare(value) or _is_record(value):
                continue
            name = f"{owner.__name__}.{name}" if owner else name
            found.setdefault(name, value)
        return found

    @cached_property
    def arguments(self) -> list[Argument]:
        """The arguments of all functions."""
        return [
            Argument(function, parameter.name, _hint(parameter, value), _raises(value))
            for function, value in self.functions.items()
            for parameter in _parameters(value)
        ]

    def call(self, function: str, /, **changed: Any) -> Any:
        """Calls a function with valid arguments, some of them changed."""
        with self.around(function):
            call = self._bound(function)
            arguments = self._valid(function, changed) | changed
            made = {
                name: value.make() if isinstance(value, Late) else value
                for name, value in arguments.items()
            }
            result = call(**made)
            if inspect.isgeneratorfunction(inspect.unwrap(self.functions[function])):
                with result:
                    pass
            return result

    def _bound(self, function: str) -> Callable[..., Any]:
        owner, _, method = function.rpartition(".")
        if function in self.calls or not owner:
            return self.calls.get(function) or self.functions[function]
        make = self.given.get(function) or self.given.get(owner)
        make = make or partial(self.call, owner)
        return getattr(make(), method)

    def _valid(self, function: str, changed: Mapping[str, Any]) -> dict[str, Any]:
        valid = {}
        for parameter in _parameters(self.functions[function]):
            own = f"{function}.{parameter.name}"
            is_needed = own in self.given or parameter.default is NOTHING
            if is_needed and parameter.name not in changed:
                make = self.given.get(own) or self.given[parameter.name]
                valid[parameter.name] = make()
        return valid

    @cached_property
    def checked(self) -> list[Argument]:
        """The arguments of which the pool holds a wrong value."""
        return [
            argument
            for argument in self.arguments
            if not all(fits(value, argument.annotation) for value in POOL)
            and not self._is_exempt(argument)
        ]

    def _is_exempt(self, argument: Argument) -> bool:
        keys = {argument.function, str(argument), f".{argument.name}"}
        return not keys.isdisjoint(self.exempt)

    def unchecked(self, rows: Iterable[WrongCall]) -> list[str]:
        """Lists functions without a wrong call, and exemptions of what is not there."""
        with_calls = {row.name for row in rows} | {a.function for a in self.checked}
        lacking = {a.function for a in self.arguments} - with_calls - self.exempt
        known = {*map(str, self.arguments)} | {f".{a.name}" for a in self.arguments}
        return sorted(lacking | (self.exempt - known - {*self.functions}))

    def rows(
        self, table: Mapping[str, Sequence[tuple[Any, type[Exception], str]]]
    ) -> list[WrongCall]:
        """Makes a row of each wrong value, error, and part of the message.

        Args:
          table: by ``"function.argument"``, by ``".argument"`` for all functions that
            have it, or by ``"function"`` with dictionaries of several arguments.
        """
        return [
            WrongCall(function, partial(self.call, function, **changed), error, says)
            for key, cases in table.items()
            for function, argument in self._named(key)
            for value, error, says in cases
            for changed in [{argument: value} if argument else value]
        ]

    def _named(self, key: str) -> list[tuple[str, str]]:
        function, _, name = key.rpartition(".")
        found = [
            (argument.function, name)
            for argument in self.arguments
            if argument.name == name and function in ("", argument.function)
            if function or not self._is_exempt(argument)
        ]
        if not found and key not in self.functions:
            raise KeyError(f"{self.package} has no {key}")
        return found or [(key, "")]

    def faults(self, argument: Argument) -> Iterator[str]:
        """Passes every wrong value of the pool, and says what is wrong of answers."""
        for value in POOL:
            if not fits(value, argument.annotation):
                fault = self._fault(argument, value)
                if fault:
                    yield f"{argument}={value!r}: {fault}"

    def _said(self, argument: Argument) -> str:
        general = self.named.get(f".{argument.name}", argument.name)
        return self.named.get(str(argument), general)

    def _fault(self, argument: Argument, value: Any) -> str:
        try:
            self.call(argument.function, **{argument.name: value})
        except (TypeError, ValueError) as error:
            message, kind = str(error), type(error).__name__
        except Exception as error:
            return f"raised {error!r}"
        else:
            return "was accepted"
        name = self._said(argument)
        kinds = wanted(argument.annotation)
        shown = [str(part) for part in _parts(value)]
        shown += [type(part).__name__ for part in _parts(value)]
        if isinstance(value, list):
            shown.append(f"'{argument.name}': {len(value)}")
        lacks = {
            "the name of the argument": not re.search(rf"\b{name}\b", message),
            "what came": not any(text in message for text in shown),
            f"what was wanted, {kinds}": not re.search(kinds, message),
            f"a place among Raises, as {kind}": kind not in argument.doc,
        }
        lacking = [what for what, is_so in lacks.items() if is_so]
        return f"lacks {', '.join(lacking)}: {message}" if lacking else ""


class WrongCalls:
    """The tests of an interface; a subclass has it, and rows of calls in a context."""

    interface: Interface
    rows: Sequence[WrongCall]
    rows_in: Callable[..., AbstractContextManager[Any]] = nullcontext  # or a method

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "argument" in metafunc.fixturenames:
            metafunc.parametrize("argument", self.interface.checked, ids=str)
        if "row" in metafunc.fixturenames:
            ids = [f"{row.name}: {row.says}" for row in self.rows]
            metafunc.parametrize("row", self.rows, ids=ids)

    def test_a_wrong_value_is_refused_in_a_sentence(self, argument: Argument) -> None:
        assert list(self.interface.faults(argument)) == []

    def test_a_wrong_call_is_refused_in_a_sentence(self, row: WrongCall) -> None:
        with self.rows_in(), pytest.raises(row.error, match=re.escape(row.says)):
            row.call()

    def test_every_public_name_has_wrong_calls(self) -> None:
        assert self.interface.unchecked(self.rows) == []


def _find(path: str) -> tuple[type | None, str, Any]:
    """Returns the class that has it or None, its name, and the object itself."""
    head, *rest = path.split(".")
    owner, value = None, importlib.import_module(head)
    for name in rest:
        head = f"{head}.{name}"
        owner = value if isinstance(value, type) else None
        if isinstance(value, types.ModuleType) and not hasattr(value, name):
            importlib.import_module(head)
        value = getattr(value, name)
    return owner, rest[-1], value


def _is_bare(value: Any) -> bool:
    """Protocols, exceptions, enums and tuples, which check nothing."""
    if not isinstance(value, type):
        return False
    is_plain = issubclass(value, BaseException | tuple) or hasattr(value, "__members__")
    return is_plain or getattr(value, "_is_protocol", False)


def _is_record(value: Any) -> bool:
    """Dataclasses whose constructors check nothing."""
    is_class = isinstance(value, type) and dataclasses.is_dataclass(value)
    return is_class and not hasattr(value, "__post_init__")


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = inspect.signature(function).parameters.values()
    return [p for p in own if p.kind not in fixed and p.name != "self"]


def _hint(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    # An alias may quote what the module that uses it does not import.
    names = {"tf": tf, "Gradient": Any, **vars(typing), **vars(collections.abc)}
    names |= vars(sys.modules[function.__module__])
    alone = types.SimpleNamespace(__annotations__={"it": parameter.annotation})
    try:
        return typing.get_type_hints(alone, names)["it"]
    except (NameError, TypeError):
        return parameter.annotation


def _raises(function: Callable[..., Any]) -> str:
    """Returns the section Raises, or the two kinds where it names neither."""
    both = "TypeError ValueError"
    _, _, section = (inspect.getdoc(function) or "").partition("\nRaises:\n")
    section = section.partition("\n\n")[0]
    return section if any(kind in section for kind in both.split()) else both


def _parts(value: Any) -> Iterator[Any]:
    """A value and what it holds."""
    yield value
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    if isinstance(inner, list):
        yield from inner
