"""Building one model function on every device, each under its tower context.

Names and arguments are those of tensorpack's ``DataParallelBuilder``
(``tensorpack/graph_builder/training.py``).

The contexts treat tensorpack's collection of moving averages as summaries.
``add_moving_summary`` of tensorpack 0.11 puts the ops that maintain the averages
in a collection of their own, from which a callback runs them in every training
step. An inference tower's op would then need that tower's inputs in every step.
"""

import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

import tensorflow as tf

import tw_core.contexts
from tw_core import Tower
from tw_core import towers as make_towers
from tw_core.checks import (
    check_flag,
    check_function,
    check_list,
    check_whole_number,
    naming,
)
from tw_core.devices import canonical_device, check_known_devices
from tw_core.flat_variables import FlatVariables
from tw_core.modes import builds_session_graph
from tw_core.synchronized import joined_towers
from tw_core.variables import override_to_local_variable, tower_build

_T = TypeVar("_T")
_log = logging.getLogger("tw_builders")

MOVING_SUMMARY_OPS_KEY = "MOVING_SUMMARY_OPS"

Device = str | Callable[[tf.Operation], str | None]


class TrainTowerContext(tw_core.contexts.TrainTowerContext):
    """A training tower; only the main one adds to ``MOVING_SUMMARY_OPS``.

    Otherwise as ``tw_core.contexts.TrainTowerContext``. Entering it freezes that
    collection in the graph, for all later towers.
    """

    def __init__(
        self, ns_name: str, vs_name: str = "", index: int = 0, total: int = 1
    ) -> None:
        super().__init__(ns_name, vs_name=vs_name, index=index, total=total)

    def __enter__(self) -> Self:
        """Enters the tower; raises as its base class does."""
        _freeze_moving_summaries()
        return super().__enter__()


class PredictTowerContext(tw_core.contexts.PredictTowerContext):
    """An inference tower, which adds nothing to ``MOVING_SUMMARY_OPS``.

    Otherwise as ``tw_core.contexts.PredictTowerContext``. Entering it freezes that
    collection in the graph, for all later towers.
    """

    def __init__(self, ns_name: str, vs_name: str = "") -> None:
        super().__init__(ns_name, vs_name=vs_name)

    def __enter__(self) -> Self:
        """Enters the tower; raises as its base class does."""
        _freeze_moving_summaries()
        return super().__enter__()


def TowerContext(
    tower_name: str, is_training: bool, vs_name: str = ""
) -> tw_core.contexts.BaseTowerContext:
    """Makes a single training tower, or an inference tower.

    Args:
      tower_name: name scope; may be empty.
      is_training: True for the training tower.
      vs_name: as in ``tw_core.contexts.TrainTowerContext`` and ``PredictTowerContext``.
    """
    kind = TrainTowerContext if is_training else PredictTowerContext
    return kind(tower_name, vs_name=vs_name)


class DataParallelBuilder:
    """A list of towers, and building on all of them.

    Attributes:
      towers: the ints (GPU numbers) and device strings given.
    """

    def __init__(
        self,
        towers: Sequence[int | str | Tower],
        *,
        flat_below_bytes: int = 0,
        flat_group: Callable[[str], Hashable | None] | None = None,
    ) -> None:
        """Makes one tower per device.

        Args:
          towers: ints (k is ``"/gpu:k"``) and device strings, at least one; or the
            result of ``tw_core.towers``.
          flat_below_bytes: trainable variables of fewer bytes are packed into one flat
            variable per tower and dtype (``tw_core.flat_variables``, whose
            ``DEFAULT_BELOW_BYTES`` was found by a sweep); 0 for none. A subclass's
            ``call_for_each_tower`` makes them, and its ``build`` packs the gradients.
          flat_group: takes the name of such a variable in tower 0, without ``":0"``,
            and returns the key of its group, which shares a flat variable, or None to
            keep it separate, as sparse gradients require. By default all are in one
            group.

        Raises:
          ValueError: no tower, a string TensorFlow cannot read, a negative number, or
            a ``flat_group`` without ``flat_below_bytes``.
          TypeError: something of another type.
        """
        with naming(type(self).__name__):
            self._towers = make_towers(towers)
        self.towers = list(towers)
        self._flat_below_bytes = check_whole_number(
            type(self).__name__, flat_below_bytes=flat_below_bytes, at_least=0
        )
        if flat_group is not None:
            check_function(type(self).__name__, flat_group=flat_group)
            if not flat_below_bytes:
                raise ValueError(
                    f"{type(self).__name__}: flat_group chooses among variables of "
                    "fewer than flat_below_bytes bytes, which is 0; give both."
                )
        self._flat_group = flat_group

    def _in_flat(self, tower_fn: Callable[[], _T]) -> Callable[[], _T]:
        """Wraps ``tower_fn`` to pack the tower's small variables into flat ones."""
        if not self._flat_below_bytes:
            return tower_fn

        def build() -> _T:
            flat = FlatVariables(self._flat_below_bytes, group=self._flat_group)
            with flat.scope():
                return tower_fn()

        return build

    @property
    def devices(self) -> list[str]:
        """The towers' device strings."""
        return [tower.device for tower in self._towers]

    @staticmethod
    def call_for_each_tower(
        towers: Sequence[int | str | Tower],
        func: Callable[[], _T],
        devices: Sequence[Device] | None = None,
        use_vs: Sequence[bool] | None = None,
    ) -> list[_T]:
        """Calls ``func()`` under each tower's device and context.

        Several builds may share a graph. The ops of the second are in the name scopes
        ``tower0_1``, ``tower1_1``, …; the variable scopes are the same. A failed build
        leaves the graph's collections as they were. ``func`` may use
        ``tw_core.synchronized``, such as its ``batch_normalization``.

        Args:
          towers: K ints and device strings, or K towers.
          func: builds the tower that ``tw_core.get_current_tower_context()`` returns.
          devices: K device strings or device functions; the towers' own
            devices by default.
          use_vs: K flags; a tower with True makes its own variables under
            ``tower<k>/`` (local and trainable), the rest share tower 0's. All
            False by default.

        Returns:
          The K results.

        Raises:
          ValueError: no tower, ``devices`` or ``use_vs`` of another length, a
            device that the default session does not have, or towers that request
            different sums over towers.
          TypeError: ``func`` is not a function, ``devices`` holds anything but
            strings and functions, or ``use_vs`` anything but bools.
          RuntimeError: in eager mode or a ``tf.function``.
        """
        caller = "DataParallelBuilder.call_for_each_tower"
        with naming(caller):
            built = make_towers(towers)
        check_function(caller, func=func)
        _check_lengths(len(built), devices=devices, use_vs=use_vs)
        _check_devices(devices or ())
        for flag in use_vs or ():
            check_flag(caller, use_vs=flag)
        check_session_graph(caller)
        with naming(caller):
            check_known_devices([tower.device for tower in built])
        results = []
        names = _free_names(len(built))
        with tower_build(undo_on_error=True), joined_towers(len(built)) as joined:
            for k, tower in enumerate(built):
                device = tower.device if devices is None else devices[k]
                own_variables = bool(use_vs[k]) if use_vs is not None else False
                _log.info("Building %s on %s", tower.name, device)
                with (
                    tf.compat.v1.device(device),
                    _tower_context(tower, names[k], own_variables),
                    override_to_local_variable(enable=own_variables),
                    joined.tower(k),
                ):
                    results.append(func())
        return results

    @staticmethod
    def build_on_towers(
        towers: Sequence[int | str | Tower],
        func: Callable[[], _T],
        devices: Sequence[Device] | None = None,
        use_vs: Sequence[bool] | None = None,
    ) -> list[_T]:
        """The older name of ``call_for_each_tower``."""
        return DataParallelBuilder.call_for_each_tower(towers, func, devices, use_vs)


def check_session_graph(caller: str) -> None:
    """Refuses eager mode and ``tf.function``, which builders do not support."""
    if not builds_session_graph():
        raise RuntimeError(
            f"{caller}: builds a session graph; got eager mode or a tf.function. Call "
            "it under tf.Graph().as_default(), or compose tw_core.map_towers, a "
            "reducer and tw_builders.apply_gradients in the tf.function."
        )


def check_tower_count(grad_list: Sequence[Any], total: int, *, caller: str) -> None:
    """Refuses a gradient list whose length is not the number of towers built."""
    check_list(caller, grad_list=grad_list, of="lists of pairs", empty=True)
    if len(grad_list) != total:
        raise ValueError(
            f"{caller}: grad_list must hold one list per tower; got {len(grad_list)} "
            f"lists for {total} towers."
        )


def _freeze_moving_summaries() -> None:
    if not tf.executing_eagerly():  # in eager mode the base class raises
        tw_core.contexts.freeze_collections(MOVING_SUMMARY_OPS_KEY)


def _tower_context(
    tower: Tower, ns_name: str, own_variables: bool
) -> AbstractContextManager[Any]:
    return TrainTowerContext(
        ns_name,
        vs_name=tower.name if own_variables else "",
        index=tower.index,
        total=tower.total,
    )


def _free_names(total: int) -> list[str]:
    """Returns unused name scopes, with one number for all towers of a further build.

    Variables are named without the number: checkpoints do not depend on earlier builds.
    """
    graph = tf.compat.v1.get_default_graph()
    numbered = (
        [f"tower{k}_{number}" if number else f"tower{k}" for k in range(total)]
        for number in itertools.count()
    )
    with graph.name_scope(None):  # the graph's root, whatever scope is open
        return next(
            names
            for names in numbered
            if all(graph.unique_name(n, mark_as_used=False) == n for n in names)
        )


def _check_devices(devices: Sequence[Any]) -> None:
    caller = "DataParallelBuilder.call_for_each_tower"
    names = [device for device in devices if isinstance(device, str)]
    others = [d for d in devices if not isinstance(d, str) and not callable(d)]
    if any(device is not None for device in others):
        raise TypeError(
            f"{caller}: devices must hold device strings and functions; got {others}."
        )
    with naming(caller):
        for name in names:
            canonical_device(name)


def _check_lengths(total: int, **per_tower: Sequence[Any] | None) -> None:
    for name, items in per_tower.items():
        if items is not None:
            one = {name: items}
            check_list("call_for_each_tower", of="items", empty=True, **one)
    wrong = {
        name: len(items)
        for name, items in per_tower.items()
        if items is not None and len(items) != total
    }
    if wrong:
        raise ValueError(
            f"call_for_each_tower: wanted one item per tower, {total}; got {wrong}."
        )
