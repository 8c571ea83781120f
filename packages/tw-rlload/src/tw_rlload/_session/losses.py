"""What ``build_graph`` returns for a tower, and reading it.

The names are those that policies of RLlib have, in its versions with this optimizer
and in the later ones (up to 2.9.3, the last that was looked at).
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tw_rlload._training.gradients import Pairs


def gradients_of(tower_loss: Any, optimizer: Any, *, caller: str) -> Pairs:
    """Asks a tower for its gradients.

    Raises:
      TypeError: ``build_graph`` returned something without ``gradients``, or that
        needs a loss and has none; ``gradients`` returned something other than pairs.
    """
    kind = type(tower_loss).__name__
    gradients = getattr(tower_loss, "gradients", None)
    if not callable(gradients):
        raise TypeError(
            f"{caller}: build_graph must return an object with gradients(optimizer); "
            f"got {kind}."
        )
    who = f"{caller}: {kind}.gradients"
    if not _takes_loss(gradients):
        return _pairs(gradients(optimizer), who)
    loss = loss_of(tower_loss)
    if loss is None:
        raise TypeError(
            f"{who} takes a loss besides the optimizer, and {kind} has no scalar "
            "tensor `loss` (or `_loss`) to give it."
        )
    return _pairs(gradients(optimizer, loss), who)


def loss_of(tower_loss: Any) -> tf.Tensor | None:
    """Returns a tower's scalar loss, or None where it shows none."""
    for name in ("loss", "_loss"):
        loss: Any = getattr(tower_loss, name, None)
        if tf.is_tensor(loss) and loss.shape.rank == 0:
            return loss
    return None


def feeds_of(tower_loss: Any) -> Mapping[Any, Any]:
    """Returns a tower's own placeholders and their present values."""
    feeds = getattr(tower_loss, "extra_compute_grad_feed_dict", None)
    return feeds() or {} if feeds else {}


def fetches_of(tower_loss: Any) -> dict[str, Any]:
    """Returns what a tower computes besides its gradients."""
    for name in ("_get_grad_and_stats_fetches", "extra_compute_grad_fetches"):
        fetches = getattr(tower_loss, name, None)
        if fetches:
            return dict(fetches() or {})
    return {}


def scalars_of(fetches: Mapping[str, Any], prefix: str = "") -> dict[str, tf.Tensor]:
    """Returns the numeric scalars among fetches, dictionaries inside included.

    Args:
      fetches: names, and tensors, operations or dictionaries.
      prefix: of the names.

    Returns:
      Tensors by name, levels joined with ``/``.
    """
    found: dict[str, tf.Tensor] = {}
    for name, value in fetches.items():
        if isinstance(value, Mapping):
            found |= scalars_of(value, f"{prefix}{name}/")
        elif tf.is_tensor(value) and _is_number(value):
            found[f"{prefix}{name}"] = value
    return found


def operations_of(fetches: Mapping[str, Any]) -> list[tf.Operation]:
    """Returns the operations among fetches, dictionaries inside included."""
    found: list[tf.Operation] = []
    for value in fetches.values():
        if isinstance(value, Mapping):
            found += operations_of(value)
        elif isinstance(value, tf.Operation):
            found.append(value)
    return found


def _takes_loss(gradients: Any) -> bool:
    try:
        inspect.signature(gradients).bind(None)
    except TypeError:
        return True
    return False


def _pairs(returned: Any, who: str) -> Pairs:
    pairs: list[Any] = list(returned) if isinstance(returned, Iterable) else [None]
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise TypeError(
            f"{who} must return a list of (gradient, variable) pairs, for one "
            f"optimizer and one loss; got {returned!r:.200}."
        )
    return [(grad, variable) for grad, variable in pairs]


def _is_number(value: Any) -> bool:
    dtype = value.dtype
    numeric = dtype.is_floating or dtype.is_integer or dtype.is_bool
    return bool(numeric and value.shape.rank == 0)
