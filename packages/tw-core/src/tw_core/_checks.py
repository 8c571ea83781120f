"""Argument checks at the public boundary, with uniform errors for all packages.

A check takes the argument by its own name, as in
``check_whole_number(below=below, at_least=0)``, and returns the value. The message
begins with that name, says what was expected, and shows the value passed. The traceback
shows the function that refused it. Nothing here needs TensorFlow.
"""

import math
import sys
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from types import UnionType
from typing import Any


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
        raise TypeError(f"{name} must be a whole number; got {_described(value)}.")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name} must be at least {at_least}; got {value}.")
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
        raise TypeError(f"{name} must be a number; got {_described(value)}.")
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
        raise ValueError(f"{name} must be {' and '.join(wanted)}; got {value}.")
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
        raise TypeError(f"{name} must be True or False; got {_described(value)}.")
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
        raise TypeError(f"{name} must be a function; got {_described(value)}.")
    return value  # type: ignore[no-any-return]


def check_kind(kind: type | UnionType, wanted: str, **argument: Any) -> Any:
    """Refuses anything that is not of a class.

    Args:
      kind: a class, or a union of classes, as in ``Path | None``.
      wanted: a description of the class, for the message.
      **argument: the one argument to check, as ``name=value``.

    Raises:
      TypeError: not of that class.

    >>> check_kind(int | None, "a port", port=80)
    80
    """
    ((name, value),) = argument.items()
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {wanted}; got {_described(value)}.")
    return value


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
        raise TypeError(f"{name} must be a string; got {_described(value)}.")
    if not value and not empty:
        raise ValueError(f"{name} must not be empty; got ''.")
    return value


def check_list(
    *,
    of: str = "items",
    empty: bool = False,
    **argument: Any,
) -> Sequence[Any]:
    """Refuses anything but a sequence; strings are refused too.

    Args:
      of: a word for its items, for the message.
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
        raise TypeError(f"{name} must be a list of {of}; got {_described(value)}.")
    if not value and not empty:
        raise ValueError(f"{name} must be a non-empty list of {of}; got {value!r}.")
    return value


def check_nested(*, of: str = "items", **argument: Any) -> Sequence[Sequence[Any]]:
    """Refuses anything but a sequence with one sequence per tower, each of any length.

    Args:
      of: a word for the inner items, for the message.
      **argument: the one argument to check, as ``name=value``.

    Raises:
      TypeError: not such a sequence; every offender is named.

    >>> check_nested(grads=[["g"], []], of="gradients")
    [['g'], []]
    """
    ((name, value),) = argument.items()
    wanted = f"{name} must be a list with one list of {of} per tower; got"
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{wanted} {_described(value)}.")
    others = [
        f"{k} ({type(tower).__name__})"
        for k, tower in enumerate(value)
        if isinstance(tower, str | bytes) or not isinstance(tower, Sequence)
    ]
    if others:
        raise TypeError(
            f"{wanted} something else for towers {', '.join(others)}. Pass a single "
            "tower's list in a list."
        )
    return value


def refusing_unknown(
    module: str, getattr_: Callable[[str], object]
) -> Callable[[str], object]:
    """Makes a module refuse unknown names as Python does, with "Did you mean".

    Names that a module other than the package's ``__init__``, such as ``internal``,
    loads on first use are stored on that module, not on the package.

    Args:
      module: the module's name.
      getattr_: returns the objects in the module's ``dir``, and raises
        ``AttributeError`` for any other name, as lazy_loader's does.

    Returns:
      The module's new ``__getattr__``.
    """

    def __getattr__(name: str) -> object:
        own = sys.modules[module]
        try:
            found = getattr_(name)
        except AttributeError:
            if name in dir(own):  # Something else was missing while it loaded.
                raise
            message = f"module {module!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=own) from None
        package = own.__package__
        if package and package != module:  # where lazy_loader stores what it loads
            vars(sys.modules[package]).pop(name, None)
            vars(own)[name] = found
        return found

    return __getattr__


def _described(value: Any) -> str:
    text = repr(value)
    short = text if len(text) <= 80 else f"{text[:80]}…"
    return f"{short} ({type(value).__name__})"
