"""Argument checks at the public boundary, with uniform errors for all packages.

``public`` on a function makes it the one that errors name: ``caller`` gives the name of
the function that the user called, however deep the check is. A check takes the argument
by its own name, as in ``check_whole_number(below=below, at_least=0)``, and returns the
value. The message names the caller, the value passed and what was expected. Nothing
here needs TensorFlow.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast, overload

__all__ = [
    "as_user",
    "caller",
    "check_flag",
    "check_function",
    "check_list",
    "check_nested",
    "check_number",
    "check_text",
    "check_whole_number",
    "public",
    "refusing_unknown",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_PACKAGES = (
    "tw_ampopt",
    "tw_builders",
    "tw_core",
    "tw_reduce",
    "tw_rlload",
    "tw_syncrep",
)


class _Called(NamedTuple):
    """The public function that is running."""

    own: str  # its name, with that of its class if it is a method
    home: str  # the package that it belongs to
    owner: Any = None  # the object whose method it is

    def __str__(self) -> str:
        """Names a method by the class of its object, a constructor by that alone."""
        if self.owner is None:
            return self.own
        above, _, method = self.own.rpartition(".")
        kind = type(self.owner)
        if any(base.__name__ == above for base in kind.__mro__):
            above = getattr(self.owner, "_public_name", kind.__name__)
        constructors = ("__init__", "__new__", "__post_init__", "__call__")
        return above if method in constructors else f"{above}.{method}"


_called: ContextVar[_Called | None] = ContextVar("called", default=None)


@overload
def public(function: Callable[_P, _R], /) -> Callable[_P, _R]: ...


@overload
def public(name: str, /) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...


def public(function: Any, /) -> Any:
    """Marks a function as public: errors raised inside name it as the caller.

    Goes above all other decorators. Where public functions of these packages call one
    another, the outermost is named: the user called it. Code of the user's that it
    calls, such as a tower's function, is the user again. Context managers are entered
    and left under the name; the body of another generator runs after the call.

    Args:
      function: the function or method, or the name to use in its place. Without one a
        function has its own name, a method that of its object's class before it (or
        the object's ``_public_name``), and a constructor or ``__call__`` that of the
        class alone.

    >>> @public
    ... def build(average):
    ...     return check_flag(average=average)
    >>> build(1)
    Traceback (most recent call last):
    TypeError: build: average must be True or False; got 1 (int).
    """
    if isinstance(function, str):
        return functools.partial(_make_public, name=function)
    return _make_public(function)


def _make_public(
    function: Callable[_P, _R], name: str | None = None
) -> Callable[_P, _R]:
    home = (function.__module__ or "towers").partition(".")[0]
    qualified = function.__qualname__.rpartition("<locals>.")[2]
    own, is_method = name or qualified, name is None and "." in qualified
    inner = getattr(getattr(function, "__wrapped__", None), "__code__", None)
    is_generator = inner is not None and inner.co_flags & 0x20  # inspect.CO_GENERATOR

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        outer = _called.get()
        if outer is not None:
            # Our own code calls on the user's behalf, and a user's function for itself.
            module = sys._getframe(1).f_globals.get("__name__", "")
            if module.partition(".")[0] in (*_PACKAGES, outer.home):
                return function(*args, **kwargs)
        called = _Called(own, home, args[0] if is_method and args else None)
        token = _called.set(called)
        try:
            result = function(*args, **kwargs)
        finally:
            _called.reset(token)
        return cast(_R, _Entered(result, called)) if is_generator else result

    # Not marked for AutoGraph to leave alone: a function may call one of the user's,
    # which would stay unconverted as well.
    return wrapper


class _Entered:
    """A context manager that is entered and left, but not used, under a name."""

    def __init__(self, manager: Any, called: _Called) -> None:
        self._manager, self._called = manager, called

    def __enter__(self) -> Any:
        token = _called.set(self._called)
        try:
            return self._manager.__enter__()
        finally:
            _called.reset(token)

    def __exit__(self, *error: Any) -> Any:
        token = _called.set(self._called)
        try:
            return self._manager.__exit__(*error)
        finally:
            _called.reset(token)


def as_user(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes calls of a function that the user passed in calls of the user's.

    A reducer inside of another then opens its errors with its own name.
    """

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        token = _called.set(None)
        try:
            return function(*args, **kwargs)
        finally:
            _called.reset(token)

    return call


def caller() -> str:
    """Returns the name of the public function that the user called.

    ``towers`` outside of any, as in a thread that a function has started.
    """
    return str(_called.get() or "towers")


def check_whole_number(*, at_least: int | None = None, **argument: Any) -> int:
    """Refuses anything but a whole number; bools are refused too.

    Args:
      at_least: smallest number allowed; None for no bound.
      **argument: the one argument to check, as ``name=value``.

    Returns:
      The value as an int.

    Raises:
      TypeError: not a whole number, as 2.0 is not.
      ValueError: below ``at_least``.

    >>> check_whole_number(below=4096, at_least=0)
    4096
    """
    ((name, value),) = argument.items()
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"{caller()}: {name} must be a whole number; got {_described(value)}."
        )
    if at_least is not None and value < at_least:
        raise ValueError(
            f"{caller()}: {name} must be at least {at_least}; got {value}."
        )
    return int(value)


def check_number(
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    finite: bool = True,
    **argument: Any,
) -> float:
    """Refuses anything but a real number; NaN and bools are refused too.

    Args:
      at_least: smallest number allowed; None for no bound.
      above: exclusive lower bound; None for no bound.
      below: exclusive upper bound; None for no bound.
      finite: whether infinity is refused.
      **argument: the one argument to check, as ``name=value``.

    Returns:
      The value as a float.

    Raises:
      TypeError: not a number.
      ValueError: NaN, infinite where that is refused, or out of bounds.

    >>> check_number(timeout_s=0.5, at_least=0)
    0.5
    """
    ((name, value),) = argument.items()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{caller()}: {name} must be a number; got {_described(value)}."
        )
    number = float(value)
    bounds = [
        (f"at least {at_least}", at_least is None or number >= at_least),
        (f"above {above}", above is None or number > above),
        (f"below {below}", below is None or number < below),
    ]
    wanted = [text for text, holds in bounds if not holds]
    if math.isnan(number) or (finite and math.isinf(number)):
        wanted = ["finite" if finite else "a number"]
    if wanted:
        raise ValueError(
            f"{caller()}: {name} must be {' and '.join(wanted)}; got {value}."
        )
    return number


def check_flag(**argument: Any) -> bool:
    """Refuses anything but True and False.

    Args:
      **argument: the one argument to check, as ``name=value``.

    Raises:
      TypeError: not a bool.

    >>> check_flag(average=True)
    True
    """
    ((name, value),) = argument.items()
    # NumPy's bools have their own class, recognised by name to avoid the import.
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(
            f"{caller()}: {name} must be True or False; got {_described(value)}."
        )
    return bool(value)


def check_function(**argument: Any) -> Callable[..., Any]:
    """Refuses anything that is not callable.

    Args:
      **argument: the one argument to check, as ``name=value``.

    Raises:
      TypeError: not callable.
    """
    ((name, value),) = argument.items()
    if not callable(value):
        raise TypeError(
            f"{caller()}: {name} must be a function; got {_described(value)}."
        )
    return value  # type: ignore[no-any-return]


def check_text(*, empty: bool = False, **argument: Any) -> str:
    """Refuses anything but a string.

    Args:
      empty: whether ``""`` is allowed.
      **argument: the one argument to check, as ``name=value``.

    Raises:
      TypeError: not a string.
      ValueError: an empty string where that is refused.

    >>> check_text(name="Train")
    'Train'
    """
    ((name, value),) = argument.items()
    if not isinstance(value, str):
        raise TypeError(
            f"{caller()}: {name} must be a string; got {_described(value)}."
        )
    if not value and not empty:
        raise ValueError(f"{caller()}: {name} must not be empty; got ''.")
    return value


def check_list(
    *,
    of: str = "items",
    empty: bool = False,
    **argument: Any,
) -> Sequence[Any]:
    """Refuses anything but a sequence; strings are refused too.

    Args:
      of: what it holds, for the message.
      empty: whether a sequence without items is allowed.
      **argument: the one argument to check, as ``name=value``.

    Raises:
      TypeError: not a sequence.
      ValueError: an empty sequence where that is refused.

    >>> check_list(steps=[print], of="callables") == [print]
    True
    """
    ((name, value),) = argument.items()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(
            f"{caller()}: {name} must be a list of {of}; got {_described(value)}."
        )
    if not value and not empty:
        raise ValueError(
            f"{caller()}: {name} must hold at least one of {of}; got an empty list."
        )
    return value


def check_nested(*, of: str = "items", **argument: Any) -> Sequence[Sequence[Any]]:
    """Refuses anything but a sequence with one sequence per tower, each of any length.

    Args:
      of: what the inner ones hold, for the message.
      **argument: the one argument to check, as ``name=value``.

    Raises:
      TypeError: not such a sequence; every offender is named.

    >>> check_nested(grads=[["g"], []], of="gradients")
    [['g'], []]
    """
    ((name, value),) = argument.items()
    wanted = f"{caller()}: {name} must be a list with one list of {of} per tower; got"
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{wanted} {_described(value)}.")
    others = [
        f"{k} ({type(tower).__name__})"
        for k, tower in enumerate(value)
        if isinstance(tower, str | bytes) or not isinstance(tower, Sequence)
    ]
    if others:
        raise TypeError(
            f"{wanted} something else for towers {', '.join(others)}. A single tower "
            "is a list in a list."
        )
    return value


def refusing_unknown(
    module: str, getattr_: Callable[[str], object]
) -> Callable[[str], object]:
    """Makes a module refuse unknown names as Python does, with "Did you mean".

    Args:
      module: the module's name.
      getattr_: returns the objects in the module's ``dir``, and raises
        ``AttributeError`` for any other name, as lazy_loader's does.

    Returns:
      The module's new ``__getattr__``.
    """

    def __getattr__(name: str) -> object:
        try:
            return getattr_(name)
        except AttributeError:
            package = sys.modules[module]
            if name in dir(package):  # Something else was missing while it loaded.
                raise
            message = f"module {module!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=package) from None

    return __getattr__


def _described(value: Any) -> str:
    text = repr(value)
    short = text if len(text) <= 80 else f"{text[:80]}…"
    return f"{short} ({type(value).__name__})"
