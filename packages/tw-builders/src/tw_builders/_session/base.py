"""Building one model function on every device, and the step that trains it.

Names and arguments are those of tensorpack's ``DataParallelBuilder``
(``tensorpack/graph_builder/training.py``). ``build`` reads the towers' gradients,
reduces and applies them, and synchronises the variables; a subclass determines where
variables are and which towers apply.
"""

import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tw_builders._apply import check_one_per_tower, with_flat
from tw_builders._session.sync_variables import build_sync_op
from tw_core import Tower
from tw_core import towers as make_towers
from tw_core.contexts import TrainTowerContext
from tw_core.devices import canonical_device
from tw_core.flat_variables import FlatVariables
from tw_core.gradients import GradList
from tw_core.internal import (
    Gradients,
    check_flag,
    check_function,
    check_known_devices,
    check_list,
    check_session_graph,
    check_whole_number,
    device_name,
    read_pairs,
    tower_build,
)
from tw_core.synchronized import joined_towers
from tw_core.variables import override_to_local_variable
from tw_reduce.reducers import check_weights

_T = TypeVar("_T")
_log = logging.getLogger("tw_builders")
_INSTEAD = (
    "Call it under tf.Graph().as_default(), or compose tw_core.map_towers, a "
    "reducer and tw_builders.apply_gradients in the tf.function."
)

Device = str | Callable[[tf.Operation], str | None]


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
        self._towers = _towers_of(towers)
        self.towers = list(towers)
        self._flat_below_bytes = check_whole_number(
            flat_below_bytes=flat_below_bytes, at_least=0
        )
        if flat_group is not None:
            check_function(flat_group=flat_group)
            if not flat_below_bytes:
                raise ValueError(
                    "flat_group chooses among variables of fewer than flat_below_bytes "
                    "bytes, which is 0; give both."
                )
        self._flat_group = flat_group

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
        built = _towers_of(towers)
        check_function(func=func)
        given = {"devices": devices, "use_vs": use_vs}
        check_one_per_tower(
            built, **{name: own for name, own in given.items() if own is not None}
        )
        _check_devices(devices or ())
        for flag in use_vs or ():
            check_flag(use_vs=flag)
        check_session_graph("A builder", instead=_INSTEAD)
        check_known_devices([tower.device for tower in built])
        results = []
        names = _free_names(len(built))
        with tower_build(undo_on_error=True), joined_towers(len(built)) as joined:
            for k, tower in enumerate(built):
                device = tower.device if devices is None else device_name(devices[k])
                own_variables = bool(use_vs[k]) if use_vs is not None else False
                _log.info("Building %s on %s", tower.name, device)
                vs_name = tower.name if own_variables else ""
                with (
                    tf.compat.v1.device(device),
                    TrainTowerContext(names[k], vs_name, k, len(built)),
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


class TowersBuilder(DataParallelBuilder):
    """Builds one step from the gradients of all towers; base of the public builders."""

    def call_for_each_tower(  # type: ignore[override]
        self, tower_fn: Callable[[], _T]
    ) -> list[_T]:
        """Calls ``tower_fn()`` in every tower.

        Where towers have variables of their own, those of towers 1 and up are local
        and trainable, and are under ``tower<k>/``; else the variables are tower 0's.

        Args:
          tower_fn: builds one tower; usually returns (gradient, variable) pairs.

        Returns:
          The K results.
        """
        check_function(tower_fn=tower_fn)

        def in_flat() -> _T:
            flat = FlatVariables(self._flat_below_bytes, group=self._flat_group)
            with flat.scope():
                return tower_fn()

        return DataParallelBuilder.call_for_each_tower(
            self.towers,
            in_flat if self._flat_below_bytes else tower_fn,
            devices=self._variable_devices(),
            use_vs=self._own_variables(),
        )

    def _variable_devices(self) -> Sequence[Device] | None:
        return None

    def _own_variables(self) -> Sequence[bool] | None:
        return None

    def _read(
        self,
        grad_list: GradList,
        get_opt_fn: Callable[[], Any],
        *,
        weights: Sequence[Any] | None = None,
        average: bool = True,
    ) -> Gradients:
        """Reads the arguments of ``build``; returns the gradients packed."""
        total = len(self._towers)
        check_session_graph("A builder", instead=_INSTEAD)
        check_list(grad_list=grad_list, of="lists of pairs", empty=True)
        if len(grad_list) != total:
            raise ValueError(
                f"grad_list must hold one list per tower; got {len(grad_list)} lists "
                f"for {total} towers."
            )
        is_shared = self._own_variables() is None
        read = read_pairs(grad_list, variables="shared" if is_shared else "own")
        check_function(get_opt_fn=get_opt_fn)
        check_weights(weights, num_towers=total, average=average)
        return with_flat(read)


class CopiesBuilder(TowersBuilder):
    """Every tower has all variables; base of the builders that make such copies."""

    _average: bool

    def build(
        self,
        grad_list: GradList,
        get_opt_fn: Callable[[], Any],
        *,
        weights: Sequence[Any] | None = None,
    ) -> tuple[tf.Operation, tf.Operation | None]:
        """Builds reduction, updates and copies from the towers' gradients.

        Args:
          grad_list: [K][N] (gradient, variable) pairs.
          get_opt_fn: returns a new optimizer; called once per tower that applies.
            Variables that it makes with ``get_variable`` are shared between the calls.
          weights: [K] weight of each tower's gradients in the mean, such as its
            rows; see ``tw_reduce.mean``. None for equal weights.

        Returns:
          The training op; and the op that copies every variable of tower 0,
          optimizer state included, to the other towers (None for one tower). Run the
          copy after the initialisers and after restoring, or use
          ``SyncVariablesHook``.

        Raises:
          ValueError: towers with different gradients, or with None; a variable
            that several towers share; a function that returns the same optimizer
            twice; weights without ``average``, or as ``tw_reduce.mean``.
          TypeError: something that is not an optimizer, or a Keras 3 one; weights as
            ``tw_reduce.mean``.
          RuntimeError: in eager mode or a ``tf.function``.
        """
        packed = self._read(
            grad_list, get_opt_fn, weights=weights, average=self._average
        )
        train_op = self._train_op(packed, get_opt_fn, weights)
        sync_op = build_sync_op(packed.variables) if len(packed) > 1 else None
        return train_op, sync_op

    def _own_variables(self) -> Sequence[bool] | None:
        return [not tower.is_main for tower in self._towers]

    def _train_op(
        self,
        packed: Gradients,
        get_opt_fn: Callable[[], Any],
        weights: Sequence[Any] | None,
    ) -> Any:
        raise NotImplementedError


def _towers_of(towers: Sequence[int | str | Tower]) -> tuple[Tower, ...]:
    """Makes towers of a list; a builder takes no number of GPUs."""
    check_list(towers=towers, of="ints and device strings", empty=True)
    return make_towers(towers)


def _free_names(total: int) -> list[str]:
    """Returns unused name scopes, with one number for all towers of a later build.

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
    devices = list(map(device_name, devices))
    names = [device for device in devices if isinstance(device, str)]
    others = [d for d in devices if not isinstance(d, str) and not callable(d)]
    if any(device is not None for device in others):
        raise TypeError(
            f"devices must hold device strings and functions; got {others}."
        )
    for name in names:
        canonical_device(name)
