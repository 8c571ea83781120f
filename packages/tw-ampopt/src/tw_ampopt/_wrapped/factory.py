"""From ``tf_optimizer=`` and its arguments to one wrapped optimizer per tower.

``tf_optimizer`` is a class, a factory or a dotted name. In a dotted name ``tf.``
stands for TensorFlow's v1 names first, as ``"tf.train.AdamOptimizer"`` has always
meant TensorFlow 1's class.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

import tensorflow as tf

from tw_ampopt._wrapped.master_weights import MasterWeights
from tw_ampopt._wrapped.wrapped_optimizer import WrappedOptimizer, wrap

OptimizerFactory: TypeAlias = Callable[..., Any]


def find_factory(tf_optimizer: str | OptimizerFactory, *, caller: str) -> Any:
    """Resolves a dotted name, and refuses what cannot be called.

    Args:
      tf_optimizer: called as ``tf_optimizer(name=..., learning_rate=..., **kwargs)``,
        without ``name`` where it takes none.
      caller: who asks; opens the message.

    Raises:
      TypeError: an optimizer object, or anything else that makes none.
      ValueError: a name that cannot be resolved.
    """
    given = tf_optimizer
    if isinstance(given, str):
        given = _by_name(given, caller)
    if not callable(given) or (
        hasattr(given, "apply_gradients") and not inspect.isclass(given)
    ):
        raise TypeError(
            f"{caller}: tf_optimizer must be a class, a factory or a dotted name, "
            f"since every tower needs its own optimizer; got {tf_optimizer!r}. Write "
            "e.g. tf_optimizer=keras.optimizers.Adam, learning_rate=0.001."
        )
    return given


def make_wrapped(
    factory: OptimizerFactory,
    *,
    name: str,
    learning_rate: Any,
    kwargs: dict[str, Any],
    master_copies: bool,
    caller: str,
) -> WrappedOptimizer:
    """Makes one optimizer and wraps it.

    Raises:
      TypeError: a factory that does not take these arguments, or that makes an
        optimizer of no known family.
      ValueError: a factory that refuses their values.
    """
    named = {"name": name} if _takes_name(factory) else {}
    try:
        optimizer = factory(learning_rate=learning_rate, **named, **kwargs)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{caller}: tf_optimizer must make an optimizer when it is called with "
            f"learning_rate and {sorted(kwargs)}; {factory!r} says: {error}"
        ) from error
    wrapped = wrap(optimizer, caller=caller)
    return MasterWeights(wrapped) if master_copies else wrapped


def _by_name(dotted: str, caller: str) -> Any:
    first, _, rest = dotted.partition(".")
    roots = [tf.compat.v1, tf] if first in ("tf", "tensorflow") else []
    for root in roots:
        found = _attribute(root, rest)
        if found is not None:
            return found
    found = None if roots else _imported(dotted)
    if found is None:
        raise ValueError(
            f"{caller}: tf_optimizer={dotted!r} could not be resolved; write the name "
            "as Python would import it, e.g. 'tf.train.AdamOptimizer', "
            "'keras.optimizers.Adam' or 'tw_ampopt.SimpleAdam', or pass the class."
        )
    return found


def _imported(dotted: str) -> Any:
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            module = import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        return _attribute(module, ".".join(parts[cut:]))
    return None


def _attribute(root: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        root = getattr(root, part, None)
    return root


def _takes_name(factory: OptimizerFactory) -> bool:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.name == "name" or p.kind is p.VAR_KEYWORD for p in parameters)
