"""What towers, and what trains them, must be."""

import inspect
from collections.abc import Sequence
from numbers import Real
from typing import Any

from tw_core import Tower, canonical_device, check_devices
from tw_core.checks import check_function, check_list, check_number
from tw_reduce import Reducer


def check_towers(towers: Sequence[Tower], *, caller: str) -> None:
    """Refuses what is no list of towers.

    Args:
      towers: K towers.
      caller: who asks; opens the message.

    Raises:
      TypeError: no list, or something in it that is no tower.
      ValueError: an empty list, or devices that TensorFlow does not have.
    """
    check_list(caller, towers=towers, of="towers")
    strangers = [tower for tower in towers if not isinstance(tower, Tower)]
    if strangers:
        raise TypeError(
            f"{caller}: towers must hold tw_core.Tower; got {strangers!r:.200}. Make "
            "them with tw_core.towers(devices)."
        )
    check_devices([tower.device for tower in towers], caller=caller)


def check_optimizer(optimizer: Any, *, caller: str) -> None:
    """Refuses what cannot apply gradients.

    Args:
      optimizer: an object with ``apply_gradients(pairs)``.
      caller: who asks; opens the message.

    Raises:
      TypeError: it has no such method, or is a class.
    """
    if inspect.isclass(optimizer):
        raise TypeError(
            f"{caller}: wants an optimizer object; got the class "
            f"{optimizer.__name__}. Call it."
        )
    if not callable(getattr(optimizer, "apply_gradients", None)):
        raise TypeError(
            f"{caller}: an optimizer must have apply_gradients(pairs), as "
            "tf.compat.v1.train's have and tw_ampopt's, and for EpochFunction Keras's; "
            f"got {optimizer!r:.80} ({type(optimizer).__name__})."
        )


def check_session_optimizer(optimizer: Any, *, caller: str) -> None:
    """Refuses what cannot apply gradients in a session graph.

    Args:
      optimizer: a v1 optimizer, or what has its ``apply_gradients``.
      caller: who asks; opens the message.

    Raises:
      TypeError: a Keras 3 optimizer, whose ``apply_gradients`` gives no operation
        that a session could run; see ``check_optimizer``.
    """
    check_optimizer(optimizer, caller=caller)
    kinds = type(optimizer).__mro__
    if any(kind.__module__.split(".")[0] == "keras" for kind in kinds):
        raise TypeError(
            f"{caller}: a session cannot run what Keras's {type(optimizer).__name__} "
            "applies. Take an optimizer of tf.compat.v1.train, or tw_ampopt.Optimizer "
            "around Keras's; in TensorFlow 2, EpochFunction."
        )


def check_reducer(reducer: Reducer | None, *, caller: str) -> None:
    """Refuses a reducer that cannot be called.

    Raises:
      TypeError: neither None nor a function.
    """
    if reducer is not None:
        check_function(caller, reducer=reducer)


def check_distinct(towers: Sequence[Tower], *, caller: str) -> None:
    """Refuses two towers on one device.

    Args:
      towers: K towers.
      caller: who asks; opens the message.

    Raises:
      ValueError: a device that comes twice.
    """
    names = [canonical_device(tower.device) for tower in towers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"{caller}: every tower needs a device of its own; given twice: {twice}, "
            f"in {[tower.device for tower in towers]}."
        )


def check_clipping(bound: float | None, *, caller: str) -> float | None:
    """Returns the bound of the gradients' norm, or None for none.

    Raises:
      TypeError: neither a number nor None.
      ValueError: a negative bound, NaN, or infinity.
    """
    if bound is None:
        return None
    if isinstance(bound, Real) and not bound >= 0:
        raise ValueError(
            f"{caller}: grad_norm_clipping must be above 0, or None; got {bound}."
        )
    return check_number(caller, grad_norm_clipping=bound) or None
