"""Building one model function on every device, each under its tower context.

Names and arguments are those of tensorpack's ``DataParallelBuilder``
(``tensorpack/graph_builder/training.py``).
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import tensorflow as tf

from tw_builders._tensorpack_towers import TrainTowerContext
from tw_core import (
    builds_session_graph,
    check_known_devices,
    override_to_local_variable,
    tower_build,
)
from tw_core import towers as make_towers

_T = TypeVar("_T")
_log = logging.getLogger("tw_builders")

Device = str | Callable[[tf.Operation], str | None]


class DataParallelBuilder:
    """What every builder has: a list of towers, and building on all of them.

    Attributes:
      towers: the ints (GPU numbers) and device strings given.
    """

    def __init__(self, towers: Sequence[int | str]) -> None:
        """Takes one device a tower.

        Args:
          towers: ints (k is ``"/gpu:k"``) and device strings, at least one.

        Raises:
          ValueError: no tower, or a string TensorFlow cannot read.
          TypeError: something that is neither int nor string.
        """
        self._towers = make_towers(towers)
        self.towers = list(towers)

    @property
    def devices(self) -> list[str]:
        """One device string a tower."""
        return [tower.device for tower in self._towers]

    @staticmethod
    def call_for_each_tower(
        towers: Sequence[int | str],
        func: Callable[[], _T],
        devices: Sequence[Device] | None = None,
        use_vs: Sequence[bool] | None = None,
    ) -> list[_T]:
        """Calls ``func()`` under each tower's device and context.

        Args:
          towers: K ints and device strings.
          func: builds one tower; ``tw_core.get_current_tower_context()`` tells
            it which.
          devices: K device strings or device functions; the towers' own
            devices by default.
          use_vs: K flags; a tower with True makes its own variables below
            ``tower<k>/`` (local and trainable), the others share tower 0's. All
            False by default.

        Returns:
          The K results.

        Raises:
          ValueError: no tower, ``devices`` or ``use_vs`` of another length, or
            a device that the default session does not have.
          RuntimeError: in eager mode or a ``tf.function``.
        """
        built = make_towers(towers)
        _check_lengths(len(built), devices=devices, use_vs=use_vs)
        check_session_graph("DataParallelBuilder.call_for_each_tower")
        check_known_devices(
            [tower.device for tower in built], caller="call_for_each_tower"
        )
        results = []
        with tower_build():
            for k, tower in enumerate(built):
                device = tower.device if devices is None else devices[k]
                own_variables = bool(use_vs[k]) if use_vs is not None else False
                _log.info("Building %s on %s", tower.name, device)
                with (
                    tf.compat.v1.device(device),
                    _tower_context(tower.index, tower.total, own_variables),
                    override_to_local_variable(enable=own_variables),
                ):
                    results.append(func())
        return results

    @staticmethod
    def build_on_towers(
        towers: Sequence[int | str],
        func: Callable[[], _T],
        devices: Sequence[Device] | None = None,
        use_vs: Sequence[bool] | None = None,
    ) -> list[_T]:
        """The older name of ``call_for_each_tower``."""
        return DataParallelBuilder.call_for_each_tower(towers, func, devices, use_vs)


def check_session_graph(caller: str) -> None:
    """Refuses eager mode and ``tf.function``, which builders do not serve."""
    if not builds_session_graph():
        raise RuntimeError(
            f"{caller}: builds a session graph; got eager mode or a tf.function. Use "
            "it under tf.Graph().as_default(), or compose tw_core.map_towers, a "
            "reducer and tw_builders.apply_gradients in the tf.function."
        )


def check_tower_count(grad_list: Sequence[Any], total: int, *, caller: str) -> None:
    """Refuses a gradient list of another number of towers than was built."""
    if len(grad_list) != total:
        raise ValueError(
            f"{caller}: grad_list must hold one list a tower; got {len(grad_list)} "
            f"lists for {total} towers."
        )


def _tower_context(
    index: int, total: int, own_variables: bool
) -> AbstractContextManager[Any]:
    name = f"tower{index}"
    return TrainTowerContext(
        name, vs_name=name if own_variables else "", index=index, total=total
    )


def _check_lengths(total: int, **per_tower: Sequence[Any] | None) -> None:
    wrong = {
        name: len(items)
        for name, items in per_tower.items()
        if items is not None and len(items) != total
    }
    if wrong:
        raise ValueError(
            f"call_for_each_tower: must have one item a tower, {total}; got {wrong}."
        )
