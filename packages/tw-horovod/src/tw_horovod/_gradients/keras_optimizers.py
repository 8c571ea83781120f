"""Keras optimizers that reduce gradients over all ranks."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import tensorflow as tf

from tw_core.internal import updates_elementwise, without_autograph
from tw_horovod._gradients.passes import Passes
from tw_horovod._gradients.reducer import GradientReducer
from tw_horovod._keras import IS_KERAS_2, keras

_CALLER = "DistributedOptimizer"


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes the optimizer's variables for the model's, unless they are there."""
    if hasattr(optimizer, "_create_all_weights"):  # of keras.optimizers.legacy
        optimizer._create_all_weights(variables)
    elif not getattr(optimizer, "built", False):
        optimizer.build(variables)


def find_variables(optimizer: Any) -> list[Any]:
    """Returns the optimizer's variables."""
    known = optimizer.variables
    return list(known() if callable(known) else known)


def copy_reducing(optimizer: Any, name: str | None, reducer: GradientReducer) -> Any:
    """Copies an optimizer of Keras as one that reduces first."""
    kinds: Any = (keras.optimizers.Optimizer,)
    if IS_KERAS_2:
        kinds = (*kinds, keras.optimizers.legacy.Optimizer)
    if not isinstance(optimizer, kinds):
        raise TypeError(
            f"{_CALLER}: needs an optimizer of keras.optimizers (Keras 3, or Keras 2 "
            f"with TF_USE_LEGACY_KERAS=1) or of tf.compat.v1.train; got {optimizer!r}."
        )
    if IS_KERAS_2 and isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer):
        raise ValueError(
            f"{_CALLER}: Keras 2 skips steps outside of it; pass keras.mixed_precision."
            f"LossScaleOptimizer(hvd.{_CALLER}(optimizer))."
        )
    if isinstance(optimizer, Distributed):
        raise ValueError(f"{_CALLER}: {optimizer!r} reduces gradients already.")
    own: Any = type(optimizer)
    members = {"__module__": own.__module__, "_reducer": reducer}
    members["elementwise"] = updates_elementwise(optimizer)
    reducing = _OfKeras2 if IS_KERAS_2 else _OfKeras3
    cls: Any = type(own.__name__, (reducing, own), members)
    config = optimizer.get_config()
    return cls.from_config(config | {"name": name} if name else config)


def refuse_loss_scale_around() -> NoReturn:
    """Refuses a LossScaleOptimizer of Keras 3 around a distributed optimizer."""
    raise ValueError(
        f"{_CALLER}: cannot be inside a LossScaleOptimizer, which Keras puts around "
        "the optimizer of a mixed_float16 model; pass hvd.DistributedOptimizer("
        "keras.optimizers.LossScaleOptimizer(optimizer))."
    )


@dataclass
class _Reduced:
    """Where the reduced gradient of a variable was computed."""

    graph: "weakref.ref[Any] | None"  # None: eagerly.
    is_used: bool = False  # In a graph inside of it, such as one branch of several.

    def is_around(self, graphs: Sequence[Any]) -> bool:
        """Returns whether it is one of these graphs; None is not a graph."""
        graph = None if self.graph is None else self.graph()
        return graph in graphs and (graph is not None or self.graph is None)


class _CallableList(list[Any]):
    """A list of variables for both ``optimizer.variables`` and ``.variables()``."""

    def __call__(self) -> "_CallableList":
        return self


class Distributed:
    """The part of a distributed optimizer that is not Keras's."""

    _passes: Any = None
    _reducer: GradientReducer  # The class's: from_config finds it.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._passes = Passes(self._reducer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns a copy with fresh state, as Keras does, that also reduces."""
        own: Any = self
        made = type(own).from_config(own.get_config())
        made._passes.local.update(self._passes.local)
        return made

    def __copy__(self) -> Any:
        return self.__deepcopy__({})

    def register_local_var(self, var: Any) -> None:
        """Excludes a variable's gradient from reduction."""
        self._passes.local[id(var)] = var

    def _apply_pass(self, grads: list[Any], variables: list[Any], apply: Any) -> None:
        """Adds gradients; applies the reduced ones in the last of several passes."""
        build(self, variables)
        self._passes.add(
            *(grads, variables),
            finish=lambda reduced: _call(apply, reduced, variables),
            wait=self._count_pass,
        )

    def _count_pass(self, read: Any = None) -> tf.Tensor:
        own: Any = self
        getattr(own, "inner_optimizer", own)._iterations.assign_add(1)
        return tf.constant(False)


def _call(apply: Any, grads: list[Any], variables: list[Any]) -> tf.Tensor:
    """Applies gradients in a branch of ``tf.cond``, which must return something."""
    apply(grads, variables)
    return tf.constant(True)


class _OfKeras2(Distributed):
    """Reduces where Keras 2 does for its strategies: before a loss scale decides.

    Or earlier, where gradients are computed, as Horovod does.
    """

    @without_autograph
    def compute_gradients(
        self, loss: Any, var_list: Any, tape: Any = None, **others: Any
    ) -> list[tuple[Any, Any]]:
        base: Any = super()
        compute = getattr(base, "compute_gradients", None) or base._compute_gradients
        pairs = compute(loss, var_list, tape=tape, **others)
        variables = [variable for _, variable in pairs]
        reduced = self._reduce_computed([grad for grad, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))

    def _compute_gradients(  # Its name in keras.optimizers.legacy.
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        others = {} if grad_loss is None else {"grad_loss": grad_loss}
        return self.compute_gradients(loss, var_list, tape, **others)

    @without_autograph
    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        base: Any = super()
        return self._reduce_computed(base.get_gradients(loss, params), list(params))

    def _reduce_computed(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        is_eager = tf.executing_eagerly()
        own = [n for n, grad in enumerate(grads) if grad is not None]
        for n in own:
            graph = None if is_eager else weakref.ref(tf.compat.v1.get_default_graph())
            self._passes.reduced[variables[n].ref()] = _Reduced(graph)
        if self._reducer.passes == 1 or not own:
            return self._reducer.reduce(grads, variables, self._passes.local)

        def choose(known: list[Any]) -> list[Any]:
            return [known[n] for n in own]

        build(self, variables)
        found = self._passes.add(
            *(grads, variables), finish=choose, wait=lambda read: choose(read())
        )
        results = dict(zip(own, found, strict=True))
        return [results.get(n) for n in range(len(grads))]

    def _take_reduced(self, variables: Sequence[Any]) -> list[bool]:
        """Returns which variables' gradients ``compute_gradients`` has reduced.

        Programs of Keras 2 may call it or not before ``apply_gradients``, and gradients
        must be reduced once. It may have run in this graph (then its note is used up),
        in a function that returned them to the one that applies, or outside of a
        ``tf.cond`` in which each branch applies (then all branches may use it).
        """
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        graphs = [graph]
        while graphs[-1] is not None:
            graphs.append(getattr(graphs[-1], "outer_graph", None))
        known, results = self._passes.reduced, []
        for variable in variables:
            found = known.get(variable.ref())
            is_inside = found is not None and found.is_around(graphs)
            results.append(is_inside or (found is not None and not found.is_used))
            if is_inside and found.is_around([graph]):
                del known[variable.ref()]
            elif is_inside:
                found.is_used = True
        return results

    def aggregate_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        if self._reducer.passes > 1:
            raise ValueError(
                f"{_CALLER}: backward_passes_per_step above 1 cannot be inside a "
                "LossScaleOptimizer, which skips steps between passes."
            )
        pairs = list(grads_and_vars)
        are_reduced = self._take_reduced([variable for _, variable in pairs])
        raw = [n for n, is_reduced in enumerate(are_reduced) if not is_reduced]
        grads, variables = [pairs[n][0] for n in raw], [pairs[n][1] for n in raw]
        reduced = self._reducer.reduce(grads, variables, self._passes.local)
        for n, *pair in zip(raw, reduced, variables, strict=True):
            pairs[n] = tuple(pair)
        return pairs

    _aggregate_gradients = aggregate_gradients  # its name in keras.optimizers.legacy

    @without_autograph
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        base: Any = super()
        own: Any = self
        pairs = list(grads_and_vars)
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        reduces = kwargs.get("experimental_aggregate_gradients", True)
        is_left = kwargs.get("skip_gradients_aggregation") or not reduces
        if is_left:
            self._take_reduced(variables)
        if is_left or self._reducer.passes == 1 or all(g is None for g in grads):
            return base.apply_gradients(pairs, *args, **kwargs)

        def apply(grads: list[Any], variables: list[Any]) -> None:
            applied = zip(grads, variables, strict=True)
            base.apply_gradients(applied, experimental_aggregate_gradients=False)

        are_reduced = self._take_reduced([v for g, v in pairs if g is not None])
        if not any(are_reduced):
            self._apply_pass(grads, variables, apply)
        elif all(are_reduced):
            is_due = self._passes.are_reduced()
            tf.cond(is_due, lambda: _call(apply, grads, variables), self._count_pass)
        else:
            raise ValueError(
                f"{_CALLER}: with backward_passes_per_step above 1, apply_gradients "
                "takes all gradients from compute_gradients, or none; got "
                f"{sum(are_reduced)} of {len(are_reduced)} from there."
            )
        return own.iterations


class _OfKeras3(Distributed):
    """Reduces in ``apply``, through which all of Keras 3 applies gradients."""

    @property
    def variables(self) -> _CallableList:
        """The optimizer's variables."""
        return _CallableList(super().variables)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        # A LossScaleOptimizer sets this when it wraps an optimizer. It skips steps
        # according to this rank's gradients alone, so other ranks would wait for it.
        # Before 3.10 Keras does not set it; BroadcastGlobalVariablesCallback checks it.
        if name == "loss_scale_factor" and value is None and self._passes is not None:
            refuse_loss_scale_around()
        super().__setattr__(name, value)

    @without_autograph
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduces gradients, [N] with None where there is none, and applies them."""
        base: Any = super()
        own: Any = self
        known = list(grads)
        given = trainable_variables
        variables = list(own._trainable_variables if given is None else given)
        if len(known) != len(variables):  # Keras refuses it.
            base.apply(known, trainable_variables)
        elif self._reducer.passes > 1 and any(g is not None for g in known):
            self._apply_pass(known, variables, base.apply)
        else:
            reduced = self._reducer.reduce(known, variables, self._passes.local)
            base.apply(reduced, trainable_variables)
