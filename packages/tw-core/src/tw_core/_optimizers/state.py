"""Optimizers' state: made before the first update, and compared."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_core._modes import without_autograph
from tw_core._optimizers.kinds import OptimizerKind, check_elementwise, kind_of
from tw_core._variable_kinds import is_variable, tf_variables
from tw_core.flat_variables import slots_like_parts


@without_autograph
def create_slots(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes an optimizer's state before its first update.

    The first update would otherwise make the state inside the step: a ``tf.function``
    is traced a second time for it, and in a loop or branch it cannot be made at all.
    Here it is made outside of any function, branch or loop being built, on the
    caller's device and under its name scope. Nothing is updated, and a session graph
    gets only the ops of the state.

    Args:
      optimizer: of any kind. A Keras optimizer that is already built stays as it is.
      variables: [N] variables that it will update, Keras variables included.

    Raises:
      ValueError: a Keras optimizer that cannot name its slots in a session graph; or a
        flat variable for an optimizer that treats each variable as a whole.
    """
    kind, v1_apply = kind_of(optimizer), tf.compat.v1.train.Optimizer.apply_gradients
    check_elementwise(optimizer, variables)
    with tf.init_scope(), slots_like_parts(variables):
        if kind is OptimizerKind.KERAS_3:
            _build_keras_3(optimizer, variables)
        elif kind is OptimizerKind.TF_KERAS:
            optimizer.build(tf_variables(variables))
        elif kind is OptimizerKind.V1 and type(optimizer).apply_gradients is v1_apply:
            # There is no public method for this; subclasses override this one.
            optimizer._create_slots(tf_variables(variables))
        else:
            _trace_unused_update(optimizer, variables)


def _build_keras_3(optimizer: Any, variables: Sequence[Any]) -> None:
    if optimizer.built:
        return
    try:
        optimizer.build(list(variables))
    except ValueError as error:
        if "scope name" not in str(error):
            raise
        # Adafactor gives a slot the name of its variable.
        raise ValueError(
            f"create_slots: {type(optimizer).__name__} names slots after variables, "
            f"and a session graph has no names such as {variables[0].name!r}. Pass "
            "keras.Variable objects, whose names have no colon, or train in a "
            "tf.function."
        ) from error


@without_autograph
def follow_variables(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes an optimizer's state, or again if it was made for other variables.

    State of variables that are in both lists is kept, as are the count of steps and the
    learning rate.

    Args:
      optimizer: of any kind; one that Keras 3 has not built, and any of another kind,
        is treated by ``create_slots`` alone.
      variables: [N] variables that it will update, Keras variables included.

    Raises:
      ValueError: as ``create_slots``.
    """
    if kind_of(optimizer) is not OptimizerKind.KERAS_3 or not optimizer.built:
        return create_slots(optimizer, variables)
    before, keys = dict(vars(optimizer)), optimizer._var_key
    places = {keys(own): n for n, own in enumerate(before["_trainable_variables"])}
    if list(places) == list(map(keys, variables)):
        return None
    _forget_state(optimizer)
    create_slots(optimizer, variables)
    for name, made in vars(optimizer).items():
        old: Any = before.get(name)
        if made is old:
            continue
        if is_variable(made) and is_variable(old):
            made.assign(old)
        elif isinstance(made, list) and len(made) == len(variables):  # by variable
            for own, variable in zip(made, variables, strict=True):
                n = places.get(keys(variable))
                if n is not None and is_variable(own) and own is not old[n]:
                    own.assign(old[n])
    return None


def _forget_state(optimizer: Any) -> None:
    """Leaves a Keras optimizer unbuilt, with its count of steps and learning rate."""
    lasting = {id(optimizer._iterations), id(optimizer._learning_rate)}
    kept = [own for own in optimizer.variables if id(own) in lasting]
    # A list that items were removed from could not be saved in a checkpoint, and one
    # that is set while the tracker is there adds its items to that of the tracker.
    tracker = optimizer._tracker
    del optimizer._tracker
    optimizer._variables, optimizer._trainable_variables_indices = kept, {}
    optimizer._tracker = tracker
    tracker.config["variables"] = tracker.config["variables"][0], optimizer._variables
    tracker.stored_ids["variables"] = lasting
    optimizer.built = False


def _trace_unused_update(optimizer: Any, variables: Sequence[Any]) -> None:
    scope = tf.get_current_name_scope()

    def update() -> None:
        # A traced function starts without a scope; names show whose state it is.
        with tf.name_scope(f"{scope}/" if scope else ""):
            plain = tf_variables(variables)
            optimizer.apply_gradients([(tf.zeros_like(v), v) for v in plain])

    tf.function(update, autograph=False).get_concrete_function()


def are_alike(optimizers: Sequence[Any]) -> bool:
    """Returns whether all optimizers would make the same update.

    Args:
      optimizers: of any kind, with their state made; at least one.

    Returns:
      True where all have one class, equal settings, and variables of equal shapes and
      dtypes. False where this cannot be determined.
    """
    first = optimizers[0]
    if kind_of(first) not in _READABLE:
        return False
    return all(
        type(own) is type(first)
        and _settings_of(own) == _settings_of(first)
        and _state_of(own) == _state_of(first)
        for own in optimizers[1:]
    )


_READABLE = {
    OptimizerKind.V1,
    OptimizerKind.KERAS_3,
    OptimizerKind.TF_KERAS,
    OptimizerKind.TF_KERAS_LEGACY,
}


def _state_of(optimizer: Any) -> list[Any]:
    variables = optimizer.variables
    variables = variables() if callable(variables) else variables
    return [(tuple(v.shape), v.dtype) for v in variables]


def _settings_of(optimizer: Any) -> Any:
    """Returns the settings that an update depends on; objects by identity."""
    settings = {name: _setting(value) for name, value in vars(optimizer).items()}
    for name in ("name", "_name"):
        settings.pop(name, None)
    if not hasattr(optimizer, "get_config"):
        # In TensorFlow 1's, `_lr_t` and the like are tensors of the last update.
        return {n: v for n, v in settings.items() if not n.endswith("_t")}
    # Objects in the configuration, such as schedules, may be equal but not the same.
    settings = {n: v for n, v in settings.items() if not isinstance(v, _Same)}
    try:
        with tf.init_scope():
            config = optimizer.get_config()
    except Exception:
        return object()  # equals nothing: a rate without a configuration, for example
    return settings, _without_names(config)


def _without_names(config: Any) -> Any:
    """Returns a configuration without names, with tensors by their identity."""
    if isinstance(config, dict):
        return {k: _without_names(v) for k, v in config.items() if k != "name"}
    if isinstance(config, list | tuple):
        return [_without_names(value) for value in config]
    # Comparing tensors or arrays does not give a single bool.
    return _Same(id(config)) if hasattr(config, "shape") else config


class _Same(int):
    """The identity of an object."""


def _setting(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return frozenset(value)
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, dict | list | tuple) or is_variable(value):
        return None  # state, which is compared separately
    return _Same(id(value))
