"""What ``build_graph`` returns for a tower, and reading it.

The names are those that policies of RLlib have.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import tensorflow as tf

from tw_rlload._tower_gradients import Pairs


class TowerLoss(Protocol):
    """The least that a tower's loss object has.

    It may also have ``loss`` (or ``_loss``), a scalar that ``run_epochs``
    reports; ``extra_compute_grad_feed_dict()``, placeholders and the values of
    each call; and ``extra_compute_grad_fetches()``, a dictionary of what else
    to compute.
    """

    def gradients(self, optimizer: Any) -> Pairs:
        """Returns [N] (gradient or None, variable) pairs."""
        ...


def gradients_of(tower_loss: Any, optimizer: Any, *, caller: str) -> Pairs:
    """Asks a tower for its gradients.

    Raises:
      TypeError: ``build_graph`` returned something without ``gradients``.
    """
    if not callable(getattr(tower_loss, "gradients", None)):
        raise TypeError(
            f"{caller}: build_graph must return an object with gradients(optimizer); "
            f"got {type(tower_loss).__name__}."
        )
    return [(grad, variable) for grad, variable in tower_loss.gradients(optimizer)]


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
    """Returns what a tower wants computed besides its gradients."""
    fetches = getattr(tower_loss, "extra_compute_grad_fetches", None)
    return dict(fetches() or {}) if fetches else {}


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


def _is_number(value: Any) -> bool:
    dtype = value.dtype
    numeric = dtype.is_floating or dtype.is_integer or dtype.is_bool
    return bool(numeric and value.shape.rank == 0)
