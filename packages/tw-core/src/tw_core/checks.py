"""Argument checks at the public boundary, with uniform errors for all packages.

Each takes the public name that was called, then the argument by its own name, as in
``check_whole_number("packed", below=below, at_least=0)``, and returns the value. The
message names the caller, the value passed and what was expected. Nothing here needs
TensorFlow.

A public check that other public functions call, such as
``tw_core.gradients.check_grad_list``, names the function that the user called: that
function calls it under ``naming``, and the check asks ``named_caller``.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any

__all__ = [
    "check_flag",
    "check_function",
    "check_list",
    "check_number",
    "check_text",
    "check_whole_number",
    "named_caller",
    "naming",
    "refusing_unknown",
]

_caller: ContextVar[str | None] = ContextVar("caller", default=None)


@contextmanager
def naming(caller: str) -> Iterator[None]:
    """Makes checks called inside name ``caller`` in their errors, not themselves.

    When nested, the outermost counts: it is the function that the user called. Do not
    call user functions inside.

    >>> with naming("build"):
    ...     named_caller("check_grad_list")
    'build'
    """
    token = _caller.set(named_caller(caller))
    try:
        yield
    finally:
        _caller.reset(token)


def named_caller(own: str) -> str:
    """Returns the name that opens a check's error.

    Args:
      own: the check's own public name.

    Returns:
      The name given to the outermost ``naming``; ``own`` outside of any.
    """
    return _caller.get() or own


def check_whole_number(
    caller: str, /, *, at_least: int | None = None, **argument: Any
) -> int:
    """Refuses anything but a whole number; bools are refused too.

    Args:
      caller: the public name that was called; opens the message.
      at_least: smallest number allowed; None for no bound.
      **argument: the one argument to check, as ``name=value``.

    Returns:
      The value as an int.

    Raises:
      TypeError: not a whole number, as 2.0 is not.
      ValueError: below ``at_least``.

    >>> check_whole_number("packed", below=4096, at_least=0)
    4096
    """
    ((name, value),) = argument.items()
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"{caller}: {name} must be a whole number; got {_described(value)}."
        )
    if at_least is not None and value < at_least:
        raise ValueError(f"{caller}: {name} must be at least {at_least}; got {value}.")
    return int(value)


def check_number(
    caller: str,
    /,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    finite: bool = True,
    **argument: Any,
) -> float:
    """Refuses anything but a real number; NaN and bools are refused too.

    Args:
      caller: the public name that was called; opens the message.
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

    >>> check_number("join", timeout_s=0.5, at_least=0)
    0.5
    """
    ((name, value),) = argument.items()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{caller}: {name} must be a number; got {_described(value)}.")
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
            f"{caller}: {name} must be {' and '.join(wanted)}; got {value}."
        )
    return number


def check_flag(caller: str, /, **argument: Any) -> bool:
    """Refuses anything but True and False.

    Args:
      caller: the public name that was called; opens the message.
      **argument: the one argument to check, as ``name=value``.

    Raises:
      TypeError: not a bool.

    >>> check_flag("build", average=True)
    True
    """
    ((name, value),) = argument.items()
    # NumPy's bools have their own class, recognised by name to avoid the import.
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(
            f"{caller}: {name} must be True or False; got {_described(value)}."
        )
    return bool(value)


def check_function(caller: str, /, **argument: Any) -> Callable[..., Any]:
    """Refuses anything that is not callable.

    Args:
      caller: the public name that was called; opens the message.
      **argument: the one argument to check, as ``name=value``.

    Raises:
      TypeError: not callable.
    """
    ((name, value),) = argument.items()
    if not callable(value):
        raise TypeError(
            f"{caller}: {name} must be a function; got {_described(value)}."
        )
    return value  # type: ignore[no-any-return]


def check_text(caller: str, /, *, empty: bool = False, **argument: Any) -> str:
    """Refuses anything but a string.

    Args:
      caller: the public name that was called; opens the message.
      empty: whether ``""`` is allowed.
      **argument: the one argument to check, as ``name=value``.

    Raises:
      TypeError: not a string.
      ValueError: an empty string where that is refused.

    >>> check_text("TowerOptimizer", name="Train")
    'Train'
    """
    ((name, value),) = argument.items()
    if not isinstance(value, str):
        raise TypeError(f"{caller}: {name} must be a string; got {_described(value)}.")
    if not value and not empty:
        raise ValueError(f"{caller}: {name} must not be empty; got ''.")
    return value


def check_list(
    caller: str, /, *, of: str = "items", empty: bool = False, **argument: Any
) -> Sequence[Any]:
    """Refuses anything but a sequence; strings are refused too.

    Args:
      caller: the public name that was called; opens the message.
      of: what it holds, for the message.
      empty: whether a sequence without items is allowed.
      **argument: the one argument to check, as ``name=value``.

    Raises:
      TypeError: not a sequence.
      ValueError: an empty sequence where that is refused.

    >>> check_list("AsyncRunner", steps=[print], of="callables") == [print]
    True
    """
    ((name, value),) = argument.items()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(
            f"{caller}: {name} must be a list of {of}; got {_described(value)}."
        )
    if not value and not empty:
        raise ValueError(
            f"{caller}: {name} must hold at least one of {of}; got an empty list."
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
