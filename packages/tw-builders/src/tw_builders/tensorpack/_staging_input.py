"""Batches staged on the towers' devices while a session runs the preceding step.

Source of the idea: tensorpack 0.11's ``StagingInput``
(``tensorpack/input_source/input_source.py``). Here a batch is cut, so that all towers
read one input, and the end of the input is staged like a batch, so that the batches
before it are used. A wait for a staging area holds a thread of the session and cannot
be ended from outside: if as many towers as there are threads wait for room, as in
tensorpack's areas of one batch, no thread is left to make room. So a step first checks
how many batches each area holds, and stages the next one when it has taken its own:
nothing ever waits for an area.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_builders._parts import on_devices
from tw_builders._per_tower import cut_batches, flat_parts, no_rows, packed_parts
from tw_core import Tower, towers
from tw_core.internal import check_list, check_session_graph, check_whole_number

v1 = tf.compat.v1
_HOST = -1
_OUT_OF_STEP = (
    "StagingInput: every staging area must hold nr_stage batches before a step. Run "
    "`initializer` first, `stage` with every step, and `initializer` after a step that "
    "failed. They hold:"
)


class StagingInput:
    """Stages the towers' parts of upcoming batches on their devices.

    For session graphs. ``initializer`` starts the dataset from its beginning and stages
    the first ``nr_stage`` batches. Each step then uses ``parts`` and runs ``stage``,
    in one ``session.run``: in a ``MonitoredTrainingSession`` the hook does both;
    otherwise run ``initializer``, and fetch ``stage`` with the step or ``tf.group`` it
    with the training op. Neither waits for the other.

    The step after the last batch raises ``tf.errors.OutOfRangeError``, as does every
    later one, until ``initializer`` has run again. After a step that failed, or that
    used ``parts`` without ``stage``, steps raise ``tf.errors.InvalidArgumentError``
    until then, since towers could hold parts of different batches. So only one run at
    a time may use the parts.

    Attributes:
      parts: [K] nests of tensors like the dataset's batches; tower k's are on its
        device. The first towers have one row more where K does not divide a batch's
        rows, and the last ones have none where there are fewer than K.
      stage: op that stages the next batch. Run without ``parts``, it skips a batch.
      initializer: op that starts over.
    """

    def __init__(
        self,
        input: tf.data.Dataset,
        devices: Sequence[int | str | Tower],
        nr_stage: int = 1,
    ) -> None:
        """Adds the input to the default graph.

        Args:
          input: of batches, as ``tw_builders.per_tower`` takes them.
          devices: one per tower, or towers, as the builders take them.
          nr_stage: batches staged ahead of the one in use, at least 1.

        Raises:
          ValueError: as ``per_tower``; or ``nr_stage`` below 1.
          TypeError: an argument of another type.
          RuntimeError: not in a session graph.
        """
        check_list(devices=devices, of="ints and device strings", empty=True)
        self._towers = towers(devices)
        check_whole_number(nr_stage=nr_stage, at_least=1)
        check_session_graph(
            "StagingInput", instead="Elsewhere use tw_builders.per_tower."
        )
        parts = cut_batches(input, len(self._towers), 0)
        with tf.name_scope("staging_input"), tf.device("/cpu:0"):
            source = v1.data.make_initializable_iterator(_with_end(parts))
            dtypes = [tensor.dtype for tensor in no_rows(parts)]
            areas = _areas([tower.device for tower in self._towers], dtypes)
            nothing = v1.data.make_initializable_iterator(tf.data.Dataset.range(0))
            began = [source.initializer, nothing.initializer]
            self.initializer = _initializer(source, began, areas, int(nr_stage))
            taken = _take(areas, int(nr_stage), nothing)
            self._taken = {own[0].op for own in taken}
            with tf.control_dependencies(self._taken):
                self.stage = tf.group(*_stage_next(source, areas), name="stage")
            flat = _in_order(areas, taken)[1:]
            for tensor, spec in zip(flat, source.element_spec[1:], strict=True):
                tensor.set_shape(spec.shape)
            self.parts = on_devices(packed_parts(parts, flat), self._towers)

    def hook(self) -> tf.compat.v1.train.SessionRunHook:
        """Makes the hook that initialises and stages in a monitored session.

        It runs ``stage`` with every run that uses ``parts``, and with no other.
        """
        return _StagingHook(self)


class _StagingHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Initialises, and runs ``stage`` with runs that use the parts."""

    def __init__(self, staging: StagingInput) -> None:
        self._staging = staging
        self._uses_parts: dict[tuple[str, ...], bool] = {}

    def after_create_session(
        self, session: tf.compat.v1.Session, coord: object
    ) -> None:
        del coord
        session.run(self._staging.initializer)

    def before_run(self, run_context: Any) -> tf.compat.v1.train.SessionRunArgs | None:
        fetches = run_context.original_args.fetches
        graph = run_context.session.graph
        elements = [
            graph.as_graph_element(leaf)
            for leaf in tf.nest.flatten(fetches, expand_composites=True)
            if leaf is not None
        ]
        names = tuple(element.name for element in elements)
        if names not in self._uses_parts:
            ops = {getattr(element, "op", element) for element in elements}
            self._uses_parts[names] = _depend(ops, self._staging._taken)
        if not self._uses_parts[names]:
            return None
        return v1.train.SessionRunArgs(self._staging.stage)


@dataclass(frozen=True)
class _Area:
    """A staging area, of unbounded capacity: putting never waits."""

    device: str
    positions: Sequence[int]  # of its tensors in the list that ``put`` takes
    options: Mapping[str, Any]  # by which all ops on the area find it

    def put(self, tensors: Sequence[tf.Tensor]) -> tf.Operation:
        options = {name: self.options[name] for name in ("capacity", "shared_name")}
        with tf.device(self.device):
            return tf.raw_ops.Stage(
                values=[tensors[n] for n in self.positions], **options
            )

    def run(self, op: Callable[..., Any], **arguments: Any) -> Any:
        """Makes one of the other ops on the area, such as ``tf.raw_ops.Unstage``."""
        with tf.device(self.device):
            return op(**arguments, **self.options)


def _areas(devices: Sequence[str], dtypes: Sequence[tf.DType]) -> list[_Area]:
    """Plans the host's area, for the flag and for strings, and one per tower.

    ``dtypes`` lists the tensors of tower 0's part, then tower 1's, and so on.
    """
    each = len(dtypes) // len(devices)
    by_device: dict[int, list[int]] = {_HOST: [0]}
    for n, dtype in enumerate(dtypes):
        place = _HOST if dtype == tf.string else n // each
        by_device.setdefault(place, []).append(n + 1)
    graph = v1.get_default_graph()
    all_dtypes = [tf.bool, *dtypes]
    return [
        _Area(
            device="/cpu:0" if place == _HOST else devices[place],
            positions=positions,
            options={
                "dtypes": [all_dtypes[n] for n in positions],
                "capacity": 0,
                "shared_name": graph.unique_name("staging_area"),
            },
        )
        for place, positions in sorted(by_device.items())
    ]


def _with_end(parts: tf.data.Dataset) -> tf.data.Dataset:
    """Marks every batch with True, and repeats False after the last."""

    def of_batch(*item: Any) -> tuple[Any, ...]:
        return (True, *flat_parts(item))

    def of_end(_: Any) -> tuple[Any, ...]:
        return (False, *no_rows(parts))

    # One call at a time, or tf.data chooses the parallelism of each map.
    batches = parts.map(of_batch, num_parallel_calls=1)
    end = tf.data.Dataset.range(1).map(of_end, num_parallel_calls=1)
    return batches.concatenate(end.repeat())


def _stage_next(source: Any, areas: Sequence[_Area]) -> list[tf.Operation]:
    tensors = source.get_next()
    return [area.put(tensors) for area in areas]


def _initializer(
    source: Any, began: Sequence[tf.Operation], areas: Sequence[_Area], nr_stage: int
) -> tf.Operation:
    waiting = [*began, *(area.run(tf.raw_ops.StageClear) for area in areas)]
    for _ in range(nr_stage):
        with tf.control_dependencies(waiting):
            waiting = _stage_next(source, areas)
    return tf.group(*waiting, name="initializer")


def _take(
    areas: Sequence[_Area], nr_stage: int, nothing: Any
) -> list[Sequence[tf.Tensor]]:
    with tf.control_dependencies([_ended_or_ready(areas, nr_stage, nothing)]):
        return [list(area.run(tf.raw_ops.Unstage)) for area in areas]


def _in_order(
    areas: Sequence[_Area], taken: Sequence[Sequence[tf.Tensor]]
) -> list[tf.Tensor]:
    """Lists the areas' tensors in the order in which they were put."""
    by_position = {
        n: tensor
        for area, own in zip(areas, taken, strict=True)
        for n, tensor in zip(area.positions, own, strict=True)
    }
    return [by_position[n] for n in sorted(by_position)]


def _ended_or_ready(
    areas: Sequence[_Area], nr_stage: int, nothing: Any
) -> tf.Operation:
    """Makes the op that fails unless a batch is next in every area.

    At the end it raises the OutOfRangeError of ``nothing``, an iterator without items.
    (Not a one-shot iterator: if the first step that uses it is cancelled, so are all
    later ones.)
    """
    sizes = [area.run(tf.raw_ops.StageSize) for area in areas]
    is_ready = tf.reduce_all(tf.equal(sizes, nr_stage))
    ready = tf.debugging.Assert(is_ready, [_OUT_OF_STEP, sizes], name="check_staged")
    with tf.control_dependencies([ready]):
        is_batch = areas[0].run(tf.raw_ops.StagePeek, index=0)[0]
    return tf.cond(is_batch, lambda: tf.constant(0, tf.int64), nothing.get_next).op


def _depend(ops: Iterable[tf.Operation], on: Container[tf.Operation]) -> bool:
    """Returns whether any of the ops waits for one of ``on``."""
    waiting, seen = list(ops), set(ops)
    while waiting:
        op = waiting.pop()
        if op in on:
            return True
        before = {*(tensor.op for tensor in op.inputs), *op.control_inputs} - seen
        seen |= before
        waiting += before
    return False
