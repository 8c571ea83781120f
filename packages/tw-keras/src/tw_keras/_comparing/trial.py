"""Trains a model for a few batches, plain or over towers, and records every step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tw_builders.internal import cut, part_sizes
from tw_core import Tower
from tw_keras import _batches
from tw_keras._checks import metrics_of
from tw_keras._comparing.verdict import Value, kind_of_loss
from tw_keras._copies import building
from tw_keras._keras_compat import layers_of
from tw_keras._model import TowerModel

_SEED, _OTHER_SEED = 1, 2
_MAX_ROWS = 32  # of a batch that is cut from arrays
Compile = dict[str, Any] | Callable[[Any], Any]
Record = list[list[Value]]  # after each step


class Plain(NamedTuple):
    """A training on one device; ``start`` has the variables before the first step."""

    model: Any
    start: list[Any]
    record: Record


@dataclass(frozen=True)
class Trial:
    """A model, and the batches on which it is trained, plain and over towers.

    ``is_static``: whether steps are traced for a known number of rows. ``options``: of
    ``TowerModel``.
    """

    make_model: Callable[[], Any]
    compile: Compile | None
    batches: Sequence[Any]
    is_static: bool
    towers: Sequence[Tower]
    options: dict[str, Any]

    def train_plain(self, start: Any = None, seed: int = _SEED) -> Plain:
        """Trains on one device, from new values or from ``start``."""
        model = self._make_plain(seed)
        if start is not None:
            _assign(model, start)
        start = [keras.ops.convert_to_numpy(own) for own in _state_of(model)]
        return Plain(model, start, [self._step(model, own) for own in self.batches])

    def train_towers(self, start: Any) -> Record:
        """Trains over towers, from ``start``."""

        def make_model() -> Any:
            model = self.make_model()
            building.build_layers(self._specs, model, "train_step")
            _assign(model, start)
            return model

        keras.utils.set_random_seed(_SEED)
        model = TowerModel(make_model, self.towers, **self.options)
        self._compile(model)
        return [self._step(model, own) for own in self.batches]

    def train_with_other_numbers(self, start: Any) -> Record:
        """Trains on one device, from ``start``, with other random numbers."""
        return self.train_plain(start, _OTHER_SEED).record

    def kind_of_loss(self, start: Any, tolerance: float) -> str | None:
        """Returns over what the loss is a mean; None if that cannot be computed."""
        whole = self.batches[0]
        rows = [int(size) for size in part_sizes(whole, 3)]
        if 0 in rows:
            return None
        try:
            a, b, c = cut(whole, rows)
            ab, _ = cut(whole, [rows[0] + rows[1], rows[2]])
            _, bc = cut(whole, [rows[0], rows[1] + rows[2]])
            model, losses = self._make_plain(_SEED), list[list[float]]()
            for scale in (1.0, 1.5):
                losses.append([])
                for part in (a, b, c, ab, bc, whole):
                    _assign(model, [np.asarray(scale * v, v.dtype) for v in start])
                    values = self._step(model, part)
                    losses[-1] += [v.array.item() for v in values if v.kind == "loss"]
        except Exception:  # The step needs all rows, or does not report its loss.
            return None
        return kind_of_loss(rows, losses, tolerance) if losses[0] else None

    def fails_on_a_part(self) -> bool:
        """Returns whether plain Keras fails on the rows of a tower, too."""
        whole = self.batches[0]
        part = cut(whole, part_sizes(whole, len(self.towers)))[0]
        try:
            replace(self, batches=[part]).train_plain()
        except Exception:
            return True
        return False

    def changed(self, change: Callable[[Any], None]) -> "Trial":
        """Returns a trial of the model with every layer changed."""

        def make_model() -> Any:
            model = self.make_model()
            for layer in layers_of(model):
                change(layer)
            return model

        return replace(self, make_model=make_model)

    def in_float64(self) -> "Trial":
        """Returns a trial whose batches have floats of this dtype."""

        def cast(leaf: Any) -> Any:
            return tf.cast(leaf, tf.float64) if leaf.dtype.is_floating else leaf

        batches = [tf.nest.map_structure(cast, batch) for batch in self.batches]
        return replace(self, batches=batches)

    @property
    def _specs(self) -> Any:
        return self._data(self.batches[0]).element_spec

    def _data(self, batch: Any) -> tf.data.Dataset:
        rows = _batches.static_rows(batch)
        data = tf.data.Dataset.from_tensor_slices(batch)
        return data.batch(rows, drop_remainder=self.is_static)

    def _make_plain(self, seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        with tf.device(self.towers[0].device):
            model = self.make_model()
            self._compile(model)
            model.jit_compile = False  # XLA takes long to compile, and changes nothing.
            building.build_layers(self._specs, model, "train_step")
            if not building.has_metrics_built(model, self._specs):
                building.build_metrics(self._specs, model, "train_step")
        if seed != _SEED:  # Layers may have seeds of their own.
            for own in filter(building.is_random, _variables_of(model)):
                own.assign(keras.ops.convert_to_tensor(own) + 1)
        return model

    def _compile(self, model: Any) -> None:
        if isinstance(self.compile, dict):
            model.compile(**tf.nest.map_structure(_copied, self.compile))
        elif self.compile is not None:
            self.compile(model)
        if not model.compiled:
            raise ValueError(
                "compile must be a dict of compile's arguments, or a function that "
                f"compiles a model, if make_model does not; got {self.compile!r}."
            )

    def _step(self, model: Any, batch: Any) -> list[Value]:
        """Trains one batch; returns its loss, metrics, weights and other variables."""
        model.make_train_function()
        model.reset_metrics()
        # Not by fit, which would first copy tower 0 to the others.
        logs = model.train_function(iter(self._data(batch)))
        values = [
            Value(
                "loss" if name == "loss" else "metric",
                name,
                np.asarray(value, "float64"),
            )
            for name, value in sorted(logs.items(), key=lambda item: item[0] != "loss")
        ]
        main = model.towers[0] if isinstance(model, TowerModel) else model
        for own in sorted(_state_of(main), key=lambda own: not own.trainable):
            array = keras.ops.convert_to_numpy(own).astype(np.float64)
            name = getattr(own, "path", own.name)
            values.append(Value("weight" if own.trainable else "state", name, array))
        return values


def take_batches(data: Any, steps: int, num_towers: int) -> tuple[list[Any], bool]:
    """Takes batches of tensors, or cuts arrays so that rows do not divide evenly.

    Returns whether the data says how many rows batches have.
    """
    if isinstance(data, tuple | dict) or hasattr(data, "shape"):
        data = data if isinstance(data, tuple) else (data,)
        rows = min(map(len, tf.nest.flatten(data)))
        size = max(1, min(_MAX_ROWS, rows // steps))
        size -= size > 1 and size % num_towers == 0
        data = tf.nest.map_structure(lambda leaf: leaf[: steps * size], data)
        data = tf.data.Dataset.from_tensor_slices(_tensors(data)).batch(size)
    spec = data.element_spec if isinstance(data, tf.data.Dataset) else None
    batches = [_tensors(batch) for batch in islice(data, steps)]
    if not batches:
        raise ValueError("data must have at least one batch; got none.")
    return batches, spec is not None and _batches.static_rows(spec) is not None


def _tensors(data: Any) -> Any:
    """Makes tensors as Keras does: lists are tuples, and floats have its dtype."""
    if isinstance(data, dict):
        return {name: _tensors(own) for name, own in data.items()}
    if isinstance(data, list | tuple):
        return tuple(map(_tensors, data))
    if tf.is_tensor(data):
        return data
    leaf = tf.convert_to_tensor(data)
    return tf.cast(leaf, keras.config.floatx()) if leaf.dtype.is_floating else leaf


def _copied(value: Any) -> Any:
    """Copies an optimizer, loss or metric, in today's float type; returns others."""
    kinds = (keras.optimizers.Optimizer, keras.losses.Loss, keras.metrics.Metric)
    if not isinstance(value, kinds):
        return value
    config = {k: v for k, v in value.get_config().items() if k != "dtype"}
    return type(value).from_config(config)


def _variables_of(model: Any) -> list[Any]:
    return [*model.variables, *building.unlisted_of(model)]


def _state_of(model: Any) -> list[Any]:
    """Lists the numbers of a model that do not belong to metrics, rows or seeds."""
    metrics = [own for metric in metrics_of(model) for own in metric.variables]
    others = set(map(id, (*metrics, *building.states_of_rows(model))))
    return [
        own
        for own in _variables_of(model)
        if id(own) not in others and not building.is_random(own)
        if tf.as_dtype(own.dtype).is_numeric
    ]


def _assign(model: Any, values: Sequence[Any]) -> None:
    for variable, value in zip(_state_of(model), values, strict=True):
        variable.assign(value)


def dtypes_of(model: Any) -> Iterator[str]:
    """Yields the dtypes in which a compiled model computes and adds up."""
    yield from (str(layer.compute_dtype) for layer in layers_of(model))
    yield from (tf.as_dtype(own.dtype).name for own in _state_of(model))
    for metric in metrics_of(model):
        yield from (tf.as_dtype(own.dtype).name for own in metric.variables)
    for loss in tf.nest.flatten(model.loss):
        yield str(getattr(loss, "dtype", ""))


def unsynchronized_of(model: Any) -> list[str]:
    """Names the layers that could be synchronised over towers, and are not."""
    return [layer.name for layer in layers_of(model) if _could_synchronize(layer)]


def _could_synchronize(layer: Any) -> bool:
    return getattr(layer, "synchronized", None) is False


def synchronize(layer: Any) -> None:
    """Synchronises a layer, if it can be."""
    if _could_synchronize(layer):
        layer.synchronized = True


def silence(layer: Any) -> None:
    """Sets the rates of dropout and noise to 0."""
    for name in ("rate", "stddev", "dropout", "recurrent_dropout"):
        if hasattr(layer, "seed_generator") and name in vars(layer):
            setattr(layer, name, 0.0)


def freeze_statistics(layer: Any) -> None:
    """Makes batch normalisation use its averages, to which no batch contributes."""
    if hasattr(layer, "synchronized"):
        layer.trainable = False
