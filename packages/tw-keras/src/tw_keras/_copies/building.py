"""Builds a model from its first batch, and lists its random generators' states."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import keras
import tensorflow as tf

from tw_core.internal import is_variable, tf_variable
from tw_keras import _batches
from tw_keras._checks import metrics_of, optimizers_of
from tw_keras._keras_compat import (
    build_from_symbols,
    compiled_loss_of,
    layers_of,
    replaced,
)


def is_seed(variable: Any) -> bool:
    """Returns whether a Keras variable is the state of a random generator."""
    return str(variable.path).endswith("seed_generator_state")


def unlisted_of(model: Any) -> list[Any]:
    """Lists a model's variables that Keras does not list.

    Searches wherever Keras or ``tf.Module`` would track them: attributes of layers,
    modules and TensorFlow's random generators, and lists and dicts in these.
    """
    seen = {id(tf_variable(v)) for v in model.variables}
    found: list[Any] = []
    stack: list[Any] = [model]
    while stack:
        value = stack.pop()
        if type(value) in _LEAVES:  # Most are; this runs between epochs.
            continue
        value = value.state if isinstance(value, tf.random.Generator) else value
        key = id(tf_variable(value)) if is_variable(value) else id(value)
        if key in seen or isinstance(value, keras.optimizers.Optimizer):
            continue
        seen.add(key)
        if is_variable(value):
            found.append(value)
        elif isinstance(value, dict):
            stack += reversed(list(value.values()))
        elif isinstance(value, list | tuple):
            stack += reversed(value)
        elif isinstance(value, _HOLDERS):
            stack += [vars(value)[name] for name in sorted(vars(value), reverse=True)]
    return found


_LEAVES = {type(None), bool, int, float, str, type, FunctionType, MethodType}
_HOLDERS = (keras.layers.Layer, keras.random.SeedGenerator, tf.Module)


def states_of_rows(model: Any) -> list[Any]:
    """Lists the states of stateful recurrent layers, one per row of a batch."""
    stateful = [o for o in layers_of(model) if getattr(o, "stateful", False)]
    every = [tf.nest.flatten(getattr(layer, "states", None)) for layer in stateful]
    return [state for states in every for state in states if is_variable(state)]


def is_random(variable: Any) -> bool:
    """Returns whether a variable is the state of a random generator of any kind."""
    is_keras = hasattr(variable, "path") and is_seed(variable)
    return is_keras or str(variable.name).startswith("StateVar")


def seeds_of(model: Any) -> list[Any]:
    """Lists the [2] states of a model's random generators: a seed and a counter."""
    every = (*model.variables, *unlisted_of(model))
    return [v for v in every if hasattr(v, "path") and is_seed(v)]


class _Updates(keras.StatelessScope):  # type: ignore[misc] # untyped
    """Records the update that would be assigned, without assigning it."""

    def add_update(self, update: Any) -> None:
        self.updated = update[0]
        super().add_update(update)


def global_seeds() -> Sequence[tf.Variable]:
    """Lists the state of the generator that ``keras.random`` uses without a seed.

    Creates it if needed, since a step may not. Towers share it and draw in turn.
    """
    with tf.init_scope(), _Updates() as updates:
        keras.random.uniform([])
    return (tf_variable(updates.updated),)


def has_metrics_built(model: Any, data: Any) -> bool:
    """Returns whether the state of a compiled model's losses and metrics exists."""
    stateful = metrics_of(model)
    y = data[1] if isinstance(data, tuple) and len(data) in (2, 3) else None
    outputs = (model.built and getattr(model, "outputs", None)) or ()
    if not model.run_eagerly and max(len(outputs), len(tf.nest.flatten(y))) > 1:
        # The loss of a model with several outputs has one metric per output.
        stateful.append(compiled_loss_of(model))
    return all(getattr(metric, "built", True) for metric in stateful)


def build_layers(data: Any, model: Any, method: str) -> None:
    """Creates a model's variables from a batch's specs, as its step would.

    Calls the model, and traces the step ``method`` if layers are left, such as a
    teacher that only a ``train_step`` calls. If that fails, so does the step, with its
    own error.
    """
    is_own, failed = has_own_step(model), None
    # Some need to know the number of rows; others must not.
    batches = _batches.any_rows(data), _batches.specs(data)
    if type(model).call is not keras.Model.call and not model.built:
        failed = _trace_any(partial(_call, model, is_own=is_own), batches)
        if failed is not None and not is_own:
            raise failed
    if failed is not None or unbuilt_of(model):
        _trace_any(partial(_step, model, method), batches)
    model.built = True


def unbuilt_of(model: Any) -> list[str]:
    """Names a model's layers that may still create variables."""
    return [layer.name for layer in layers_of(model)[1:] if not layer.built]


def _call(model: Any, data: Any, *, is_own: bool) -> None:
    with warnings.catch_warnings():
        if is_own:  # What the call does not build, the step may.
            warnings.filterwarnings("ignore", r"`build\(\)` was called on layer")
        model(keras.utils.unpack_x_y_sample_weight(data)[0])


def build_metrics(data: Any, model: Any, method: str) -> None:
    """Creates the state of a compiled model's losses and metrics."""
    batch = _batches.any_rows(data)
    optimizer, model.optimizer = model.optimizer, None  # its slots are placed elsewhere
    try:
        build_from_symbols(model, _symbols(batch))
    except Exception:
        if not has_own_step(model):
            raise
        model.optimizer = optimizer
        _trace(partial(_step, model, method), batch)
    finally:
        model.optimizer = optimizer


def has_own_step(model: Any) -> bool:
    """Returns whether a model's class overrides ``train_step``."""
    return type(model).train_step is not keras.Model.train_step


def _step(model: Any, method: str, data: Any) -> None:
    """Calls a step whose optimizers create no slots; those are placed elsewhere."""
    with ExitStack() as stack:
        for optimizer in optimizers_of(model):
            stack.enter_context(replaced(optimizer, "apply", lambda _: _apply_nothing))
        getattr(model, method)(data)


def _apply_nothing(*_: Any, **__: Any) -> None:
    pass


def _trace_any(call: Callable[[Any], None], batches: Sequence[Any]) -> Any:
    """Traces a call with the first batch that it takes; returns the error if none."""
    for batch in batches:
        try:
            _trace(call, batch)
        except Exception as error:
            failed = error
        else:
            return None
    return failed


def _trace(call: Callable[[Any], None], batch: Any) -> None:
    """Traces a call, so that it creates its variables; nothing runs.

    A ``tf.function`` would initialize them only if all of the trace succeeds.
    """

    def symbol(spec: tf.TensorSpec | None) -> Any:
        return spec and tf.compat.v1.placeholder(spec.dtype, spec.shape)

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        with tf.init_scope():  # If predict is being traced, it would initialize them.
            return next_creator(**kwargs)

    graph = tf.__internal__.FuncGraph("build")
    with graph.as_default(), tf.variable_creator_scope(create):
        call(tf.nest.map_structure(symbol, batch, expand_composites=True))


def _symbols(batch: Any) -> Any:
    def symbol(spec: Any) -> Any:
        is_sparse = isinstance(spec, tf.SparseTensorSpec)
        return spec and keras.KerasTensor(spec.shape, spec.dtype.name, sparse=is_sparse)

    return tf.nest.map_structure(symbol, batch)
