"""Old public names that keep working for one version, with a warning.

Each package lists its own in a module ``_renamed``. Does not import TensorFlow.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from tw_core.checks import check_text, naming

__all__ = [
    "answer_renamed",
    "renamed_arguments",
    "renamed_attribute",
    "takes_caller",
    "warn_renamed",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def answer_renamed(
    module: str, table: Mapping[str, str], getattr_: Callable[[str], object]
) -> Callable[[str], object]:
    """Extends a module's ``__getattr__`` to old names.

    Args:
      module: the module's name.
      table: old name -> where the object is now, such as
        ``"tw_core.contexts.PredictTowerContext"``.
      getattr_: returns the objects in the module's ``dir``, and raises
        ``AttributeError`` for any other name, as lazy_loader's does.

    Returns:
      The new ``__getattr__``. An old name gives the new object and a
      ``DeprecationWarning`` at the caller's line; an unknown one raises Python's own
      message, to which a traceback adds "Did you mean".
    """

    def __getattr__(name: str) -> object:
        if name in table:
            warn_renamed(f"{module}.{name}", table[name])
            home, _, new = table[name].rpartition(".")
            return getattr(import_module(home), new)
        try:
            return getattr_(name)
        except AttributeError:
            package = sys.modules[module]
            if name in dir(package):  # Something else was missing while it loaded.
                raise
            message = f"module {module!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=package) from None

    return __getattr__


def renamed_arguments(
    **table: str | tuple[str, Callable[[Any], Any]],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a function accept old keyword arguments under their new names.

    Goes above ``without_autograph``, so that the warning names the right line.

    Args:
      **table: old keyword -> new keyword; where the units changed as well,
        (new keyword, function from the old value to the new one).

    Returns:
      A decorator. An old keyword gives a ``DeprecationWarning`` at the caller's line;
      together with its new name it raises ``TypeError``.
    """
    renamed = {
        old: new if isinstance(new, tuple) else (new, _as_it_is)
        for old, new in table.items()
    }

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> _R:
            for old in renamed.keys() & kwargs.keys():
                new, convert = renamed[old]
                warn_renamed(f"{name}({old}=...)", f"{name}({new}=...)")
                if _is_given(function, new, args, kwargs):
                    raise TypeError(
                        f"{name}: got both {new} and {old}, its old name; pass {new}."
                    )
                kwargs[new] = convert(kwargs.pop(old))
            return function(*args, **kwargs)

        return wrapper

    return decorate


def _as_it_is(value: Any) -> Any:
    return value


def _is_given(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Any
) -> bool:
    import inspect  # here, as it loads more slowly than the rest of the package

    position = list(inspect.signature(function).parameters).index(name)
    is_positional = inspect.signature(function).parameters[name].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return name in kwargs or (is_positional and position < len(args))


def takes_caller(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes a check accept its old argument ``caller``, the name that opens its errors.

    Goes above ``without_autograph``, so that the warning names the right line.
    """
    name = function.__qualname__

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> _R:
        if "caller" not in kwargs:
            return function(*args, **kwargs)
        warn_renamed(f"{name}(caller=...)", "with tw_core.checks.naming(...)")
        with naming(check_text(name, caller=kwargs.pop("caller"))):
            return function(*args, **kwargs)

    return wrapper


def renamed_attribute(new: str) -> Any:
    """Returns a property, for the old name, that reads the attribute ``new``.

    Reading it gives a ``DeprecationWarning`` at the caller's line.
    """
    return _RenamedAttribute(new)


class _RenamedAttribute:
    def __init__(self, new: str) -> None:
        self._new = new
        self._old = ""
        self.__doc__ = f"Old name of ``{new}``."

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        warn_renamed(f"{owner.__name__}.{self._old}", f"{owner.__name__}.{self._new}")
        return getattr(instance, self._new)


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warns that ``old`` is now ``new`` and works for this version only.

    Args:
      old: the name that was used, such as ``tw_core.PredictTowerContext``.
      new: what to use.
      stacklevel: frames between this function and the line to name, itself included.
    """
    message = f"{old} is deprecated and will be removed in 0.4; use {new}."
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)
