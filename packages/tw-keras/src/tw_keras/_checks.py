"""Checks of a ``TowerModel``'s arguments, layers, losses and optimizers."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tw_keras._keras_compat import layers_of
from tw_keras._update.at_owners import held_in
from tw_keras._update.over_towers import WrappedOptimizer

OUTER = "outer_optimizer"
"""Tower 0's attribute that holds an outer optimizer, to save it; steps do not apply it.
"""


def check_choices(**choices: tuple[Any, Sequence[Any]]) -> None:
    """Refuses unknown values."""
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(
                f"TowerModel: {name} must be {' or '.join(map(repr, known))}; got "
                f"{value!r}."
            )


def check_sends_gradients(**others: bool) -> None:
    """Refuses a dtype of whole gradients where ranks do not send these."""
    given = [name.replace("_", " ") for name, is_given in others.items() if is_given]
    if given:
        raise ValueError(
            "TowerModel: wire_dtype is the dtype of whole gradients that ranks send in "
            f"every step; with {' and '.join(given)} they send other things. Leave one "
            "of these out."
        )


def check_alone(**choices: tuple[Any, Any]) -> None:
    """Refuses values other than the defaults that only a group would use."""
    given = [
        f"{name}={value!r}"
        for name, (value, default) in choices.items()
        if value != default
    ]
    if given:
        raise ValueError(
            f"TowerModel: {' and '.join(given)} need{'s' * (len(given) == 1)} a group "
            "of ranks; pass group=tw_ranks.join(), or leave that out."
        )


def check_needs_nothing(make_model: Callable[..., Any]) -> None:
    """Refuses a function that cannot be called without arguments."""
    is_class = isinstance(make_model, type)  # whose __new__ takes anything, in Keras
    called = getattr(make_model, "__init__") if is_class else make_model  # noqa: B009
    try:
        inspect.signature(called).bind(*[None] * is_class)
    except TypeError as error:
        raise TypeError(
            "TowerModel: make_model is called without arguments, once per tower; got "
            f"one with {error}. Bind them: lambda: make_model(...), or "
            "functools.partial(make_model, ...)."
        ) from None
    except ValueError:  # Some functions written in C have no signature.
        pass


def check_records(places: Sequence[int]) -> None:
    """Refuses to compress float8 layers' records."""
    if places:
        raise ValueError(
            "TowerModel: float8 layers record their largest inputs in variables that "
            "Keras overwrites with their gradients, which a reducer with memory, or "
            "wire_dtype, would compress; leave that out."
        )


def check_outside() -> None:
    """Refuses a model that is made in a graph, or in the scope of a strategy."""
    if not tf.executing_eagerly():
        raise RuntimeError(
            "TowerModel: must be made outside of graphs and tf.function, as it makes "
            "its own functions."
        )
    if tf.distribute.has_strategy():
        raise ValueError(
            "TowerModel: makes its own copies of the model, and cannot be made in the "
            "scope of a tf.distribute strategy; leave that scope."
        )


def optimizers_of(model: Any) -> list[Any]:
    """Lists the Keras optimizers that a model or its layers hold, also in containers.

    Those of the model itself are first, sorted by the attributes' names.
    """
    held: list[Any] = []
    kinds = (keras.optimizers.Optimizer, dict, list, tuple)
    for layer in layers_of(model):
        for _, value in sorted(vars(layer).items()):
            if isinstance(value, kinds):
                held += held_in(value)
    outer = vars(model).get(OUTER)  # also in TensorFlow's dicts of tracked objects
    found = [leaf for leaf in held if isinstance(leaf, keras.optimizers.Optimizer)]
    return list({id(own): own for own in found if own is not outer}.values())


def metrics_of(model: Any) -> list[Any]:
    """Lists a model's metrics, also compiled ones that its ``metrics`` leaves out.

    A plain step updates those, too.
    """
    metrics = [*model.metrics, *keras.Model.metrics.fget(model)]
    return list({id(metric): metric for metric in metrics}.values())


def check_adapted(models: Sequence[Any]) -> None:
    """Refuses layers adapted in some copies only, whose state is not in variables."""
    layers = zip(*map(layers_of, models), strict=False)
    unlike = [
        column[0].name
        for column in layers
        if hasattr(column[0], "adapt") and len(set(map(_adapted, column))) > 1
    ]
    if unlike:
        raise ValueError(
            f"TowerModel: {', '.join(unlike)} was adapted in some towers only, and "
            "its adapted state is not in variables; call adapt in make_model."
        )


def _adapted(layer: Any) -> str:
    if hasattr(layer, "get_vocabulary"):
        return str(layer.get_vocabulary())
    names = ("mean", "variance", "bin_boundaries")
    return str([np.asarray(getattr(layer, name, None)).tolist() for name in names])


def check_optimizers(
    optimizers: Sequence[Any], variables: str, *, num_towers: int, reduces: bool
) -> None:
    """Refuses optimizers that do not work with these variables, towers or a reducer.

    ``reduces``: a reducer was given that only an optimizer's update would call.
    """
    over_towers = [o for o in optimizers if isinstance(o, WrappedOptimizer)]
    for wrapped in [optimizer.wrapped for optimizer in over_towers]:
        known = len(getattr(wrapped, "devices", ())) or num_towers
        if known != num_towers:
            raise ValueError(
                f"TowerModel: {type(wrapped).__name__} was made for {known} towers, "
                f"and the model has {num_towers}; pass each tower's variables to it, "
                "or, where towers share them, towers=tw_core.towers(model.devices)."
            )
    if reduces and over_towers:
        name = type(over_towers[0].wrapped).__name__
        raise ValueError(
            f"TowerModel: reducer is not called with {name}, which adds the towers' "
            f"gradients itself; pass the reducer to {name}."
        )
    if over_towers and variables == "sharded":
        raise ValueError(
            f"TowerModel: {type(over_towers[0].wrapped).__name__} updates all towers' "
            "variables itself; use variables='replicated' or 'parameter_server'."
        )


def reductions_of(model: Any) -> frozenset[str]:
    """Returns how a compiled model's losses are reduced."""
    losses = tf.nest.flatten(getattr(model, "loss", None))
    return frozenset(
        getattr(loss, "reduction", "sum_over_batch_size")
        for loss in losses
        if loss is not None
    )


def check_losses(reductions: frozenset[str]) -> None:
    """Refuses losses that cannot be combined over towers."""
    if reductions & {"none", None}:
        raise ValueError(
            "TowerModel: every loss that compute_loss uses must have a reduction other "
            "than 'none', so that the towers' losses can be combined; got "
            f"{sorted(map(str, reductions))}."
        )


def synchronized_layers_of(model: Any) -> list[str]:
    """Names the layers that are synchronised over towers."""
    return [o.name for o in layers_of(model) if getattr(o, "synchronized", False)]
