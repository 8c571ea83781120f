"""What a set of towers must be for each to hold its own part of a batch."""

from collections.abc import Sequence

from tw_core import Tower, canonical_device


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
      ValueError: a negative bound, or NaN.
    """
    if bound is not None and not bound >= 0:
        raise ValueError(
            f"{caller}: grad_norm_clipping must be above 0, or None; got {bound}."
        )
    return float(bound) if bound else None
