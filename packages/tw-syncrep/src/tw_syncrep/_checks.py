"""Checks of arguments that several public functions take."""

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import tensorflow as tf


def check_timeouts(**given: Any) -> None:
    """Refuses timeouts that are neither None nor finite seconds above 0."""
    wrong = {name: s for name, s in given.items() if s is not None and not _is_time(s)}
    if not wrong:
        return
    kind = ValueError if all(map(_is_number, wrong.values())) else TypeError
    raise kind(
        "Timeouts must be seconds above 0, or None to wait forever; got "
        f"{', '.join(f'{name}={s!r}' for name, s in wrong.items())}."
    )


def check_methods(methods: Iterable[str], wanted: str, **given: Any) -> None:
    """Refuses an argument that lacks some of the methods, or is a class."""
    for name, value in given.items():
        lacking = [m for m in methods if not callable(getattr(value, m, None))]
        if isinstance(value, type):
            raise TypeError(
                f"{name} must be {wanted}; got the class {value.__name__}. Pass an "
                "instance."
            )
        if lacking:
            raise TypeError(
                f"{name} must be {wanted}; got {value!r}, which has no "
                f"{', '.join(lacking)}."
            )


def check_session(session: Any, graph: tf.Graph) -> None:
    """Refuses anything that cannot run ops of a graph."""
    check_methods(["run"], "a session", session=session)
    launched = getattr(session, "graph", None)
    if launched is not None and launched is not graph:
        raise ValueError(
            "session must belong to the graph in which apply_gradients was called; got "
            "a session of another graph."
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    return _is_number(value) and 0 < value < math.inf
