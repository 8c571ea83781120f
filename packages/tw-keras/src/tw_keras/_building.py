"""Builds a model from its first batch, and lists its random generators' states."""

from collections.abc import Sequence
from types import FunctionType, MethodType
from typing import Any

import keras
import tensorflow as tf

from tw_core.flat_variables import flat_variable_of
from tw_core.internal import is_variable, tf_variable
from tw_keras._checks import layers_of, optimizers_of


def is_seed(variable: Any) -> bool:
    """Returns whether a Keras variable is the state of a random generator."""
    return str(variable.path).endswith("seed_generator_state")


def unlisted_of(model: Any) -> list[Any]:
    """Lists a model's variables that Keras does not list.

    Searches wherever Keras or ``tf.Module`` would track them: attributes of layers,
    modules and TensorFlow's random generators, and lists and dicts in these.
    """
    flat = [flat_variable_of(own) for own in model.variables]
    listed = [*model.variables, *(own for own in flat if own is not None)]
    seen = {id(tf_variable(own)) for own in listed}
    found: list[Any] = []
    stack: list[Any] = [model]
    while stack:
        own = stack.pop()
        if type(own) in _LEAVES:  # Most are; this runs between epochs.
            continue
        own = own.state if isinstance(own, tf.random.Generator) else own
        key = id(tf_variable(own)) if is_variable(own) else id(own)
        if key in seen or isinstance(own, keras.optimizers.Optimizer):
            continue
        seen.add(key)
        if is_variable(own):
            found.append(own)
        elif isinstance(own, dict):
            stack += reversed(list(own.values()))
        elif isinstance(own, list | tuple):
            stack += reversed(own)
        elif isinstance(own, _HOLDERS):
            stack += [vars(own)[name] for name in sorted(vars(own), reverse=True)]
    return found


_LEAVES = {type(None), bool, int, float, str, type, FunctionType, MethodType}
_HOLDERS = (keras.layers.Layer, keras.random.SeedGenerator, tf.Module)


def states_of_rows(model: Any) -> list[Any]:
    """Lists the states of stateful recurrent layers, one per row of a batch."""
    stateful = [o for o in layers_of(model) if getattr(o, "stateful", False)]
    every = [tf.nest.flatten(getattr(own, "states", None)) for own in stateful]
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
    stateful = list(model.metrics)
    y = data[1] if isinstance(data, tuple) and len(data) in (2, 3) else None
    outputs = (model.built and getattr(model, "outputs", None)) or ()
    if not model.run_eagerly and max(len(outputs), len(tf.nest.flatten(y))) > 1:
        # The loss of a model with several outputs has one metric per output.
        stateful.append(getattr(model, "_compile_loss", None))
    return all(getattr(own, "built", True) for own in stateful)


def build_variables(batch: Any, model: Any) -> None:
    """Calls a model on symbolic inputs, unless built or without a ``call``.

    An overridden ``train_step`` may take batches other than ``(x, y, sample_weight)``,
    or call the model or its parts differently; then it is traced instead.
    """
    own_step = has_own_step(model)
    if model.built or (own_step and type(model).call is keras.Model.call):
        return
    try:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(_symbols(batch))
        model(x)
    except Exception:
        if not own_step:
            raise
        _trace_step(batch, model)


def build_metrics(batch: Any, model: Any) -> None:
    """Creates the state of a compiled model's losses and metrics."""
    optimizer, model.optimizer = model.optimizer, None  # its slots are placed elsewhere
    try:
        model._symbolic_build(data_batch=_symbols(batch))
    except Exception:
        if not has_own_step(model):
            raise
        model.optimizer = optimizer
        _trace_step(batch, model)
    finally:
        model.optimizer = optimizer


def has_own_step(model: Any) -> bool:
    """Returns whether a model's class overrides ``train_step``."""
    return type(model).train_step is not keras.Model.train_step


def _trace_step(batch: Any, model: Any) -> None:
    """Traces an overridden ``train_step``, so that it creates its variables.

    Nothing runs. Optimizers create no slots; those are placed elsewhere.
    """
    optimizers = optimizers_of(model)

    def step(data: Any) -> None:
        model.train_step(data)

    for own in optimizers:
        own.apply = lambda *_, **__: None
    try:
        tf.function(step, autograph=False).get_concrete_function(batch)
    finally:
        for own in optimizers:
            del own.apply


def _symbols(batch: Any) -> Any:
    def symbol(spec: tf.TensorSpec | None) -> Any:
        return None if spec is None else keras.KerasTensor(spec.shape, spec.dtype.name)

    return tf.nest.map_structure(symbol, batch)
