"""Applying gradients as each optimizer requires, compiled or not."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core._modes import (
    compiles_with_xla,
    orders_effects,
    traces_function,
    without_autograph,
)
from tw_core._optimizers.kinds import OptimizerKind, check_elementwise, kind_of
from tw_core._tf_compat import captured_from, compiled_types
from tw_core._tracing import call_once, device_in_trace
from tw_core._variable_kinds import CALLS, tf_variable, tf_variables
from tw_core.flat_variables import slots_like_parts
from tw_core.gradients._values import with_unique_rows

_keeps_rows = ContextVar("_keeps_rows", default=False)


@without_autograph
def apply_pairs(
    optimizer: Any,
    pairs: Sequence[tuple[Any, Any]],
    *,
    name: str | None = None,
    jit_compile: bool = False,
) -> Any:
    """Applies gradients as the optimizer's kind requires.

    For a Keras 3 optimizer, rows that share an index are summed first, since most of
    these square each row or the like; in a session graph it is called in a function.
    All others get ``tf.Variable`` objects. Gradients that were made outside of the
    branch or loop being built are copied into it, where Keras requires that. Where
    effects are not ordered, as in a session graph, nothing is updated before all
    gradients are computed: until then some may still have to read the variables.

    Args:
      optimizer: of any kind.
      pairs: [N] (gradient or None, variable).
      name: of the update op; None for the optimizer's own. Keras 3 ignores it.
      jit_compile: in a ``tf.function``, whether XLA compiles the update, one function
        for each device that has variables.

    Returns:
      An op or tensor that depends on the update; None where the update runs
      automatically.

    Raises:
      ValueError: a flat variable for an optimizer that treats each variable as a whole;
        ``jit_compile`` for variables of several devices, unless Keras 3's optimizer
        updates them; an unsupported update in a function that XLA compiles.
      RuntimeError: ``jit_compile`` outside of ``tf.function``.
    """
    kind = kind_of(optimizer)
    variables = [variable for _, variable in pairs]
    check_elementwise(optimizer, variables)
    if kind is OptimizerKind.KERAS_3:
        return apply_by_keras(optimizer, pairs, jit_compile=jit_compile)
    if jit_compile:
        with tf.name_scope("apply_gradients"):
            return _apply_compiled(optimizer, pairs)
    with _refusing_what_xla_lacks(optimizer, variables):
        plain = list(zip([g for g, _ in pairs], tf_variables(variables), strict=True))
        if kind is not OptimizerKind.V1:
            plain = [(_in_this_graph(grad), variable) for grad, variable in plain]
        named = {} if name is None else {"name": name}
        with slots_like_parts(variables), _once_known([grad for grad, _ in plain]):
            return optimizer.apply_gradients(plain, **named)


def apply_by_keras(
    optimizer: Any, pairs: Sequence[tuple[Any, Any]], *, jit_compile: bool = False
) -> Any:
    """As ``apply_pairs``, for an optimizer of Keras 3 and variables that are not flat.

    Their scope is for timelines: the optimizer's name may be anything, as adam_w_1.
    """
    if jit_compile:
        with tf.name_scope("apply_gradients"):
            return _apply_compiled(optimizer, pairs)
    with (
        _refusing_what_xla_lacks(optimizer, [variable for _, variable in pairs]),
        tf.name_scope("apply_gradients"),
    ):
        return _apply_keras_3(optimizer, pairs)


@contextmanager
def _refusing_what_xla_lacks(
    optimizer: Any, variables: Sequence[Any]
) -> Iterator[None]:
    """Refuses updates built inside an XLA function that XLA does not support.

    XLA itself fails when the step first runs, and names neither optimizer nor variable.
    """
    if not compiles_with_xla():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    known, outside = compiled_types(), captured_from(graph)
    names = {id(own.handle): own.name for own in tf_variables(variables)}
    unknown = []
    for op in graph.get_operations()[before:]:
        handles = [own for own in op.inputs if own.dtype == tf.resource]
        if known and handles and op.type not in known:
            first = id(outside.get(id(handles[0]), handles[0]))
            unknown.append(f"{op.type} of {names.get(first, op.name)}")
    if unknown:
        dense = "dense gradients (tf.convert_to_tensor), " * ("Sparse" in str(unknown))
        raise ValueError(
            f"jit_compile=True: {type(optimizer).__name__} updates variables by "
            f"operations that XLA lacks; got {', '.join(unknown)}. Use {dense}an "
            "optimizer of Keras 3, or jit_compile=False."
        )


def _once_known(grads: Sequence[Any]) -> AbstractContextManager[Any]:
    """Makes ops built inside wait for all gradients, where nothing else orders them.

    A variable's own gradient need not depend on every read of the variable: another
    variable's gradient may read it too, and would do so after its update.
    """
    if orders_effects():
        return nullcontext()
    # A control edge from a branch or call does not wait for its body: once that is
    # inlined, the edge fires as soon as the branch is chosen or the call begins.
    known = [
        tf.identity(part) if part.op.type in CALLS else part
        for part in tf.nest.flatten(
            [_in_this_graph(grad) for grad in grads if grad is not None],
            expand_composites=True,
        )
    ]
    gate: AbstractContextManager[Any] = tf.control_dependencies(
        [tf.group(*known, name="gradients_known")]
    )
    return gate


@contextmanager
def keep_repeated_rows() -> Iterator[None]:
    """Makes ``apply_pairs`` pass sparse gradients to Keras 3 optimizers unchanged.

    For results that must equal Keras's own: on one device it squares rows that share
    an index separately.
    """
    token = _keeps_rows.set(True)
    try:
        yield
    finally:
        _keeps_rows.reset(token)


def _apply_keras_3(
    optimizer: Any, pairs: Sequence[tuple[Any, Any]], *, jit_compile: bool = False
) -> Any:
    def update() -> tf.Tensor:
        kept = _keeps_rows.get()
        grads = [
            _in_this_graph(grad if kept else with_unique_rows(grad))
            for grad, _ in pairs
        ]
        variables = [variable for _, variable in pairs]
        with _updates_where_variables_are(
            optimizer, variables, jit_compile=jit_compile
        ):
            optimizer.apply_gradients(list(zip(grads, variables, strict=True)))
        return tf.constant(True)

    if orders_effects():
        update()
        return None
    with _once_known([grad for grad, _ in pairs]):
        return tf.function(update, autograph=False)()


@contextmanager
def _updates_where_variables_are(
    optimizer: Any, variables: Sequence[Any], *, jit_compile: bool = False
) -> Iterator[None]:
    """Makes Keras 3 update each device's variables on that device, together.

    By default it computes all updates on the device that it is called on, to which
    variables, slots and gradients would be copied from other devices, and reads the
    update count once per variable. Here the update count and the learning rate are
    read once and copied to each device.
    """
    if not traces_function() and len(_devices_of(variables)) == 1:
        yield
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a loss scaler
    decay, decayed = inner._apply_weight_decay, dict[int, Any]()

    def update(strategy: Any, pairs: Sequence[tuple[Any, Any]], rate: Any) -> None:
        of_device = defaultdict(list)
        homes = [own.device for own in tf_variables(variable for _, variable in pairs)]
        for device, pair in zip(map(device_in_trace, homes), pairs, strict=True):
            of_device[device].append(pair)
        count, rate = tf.identity(inner._iterations), tf.convert_to_tensor(rate)
        for device, own in of_device.items():
            with tf.device(device):
                shared = [tf.identity(count), tf.identity(rate)]
            _call(
                partial(update_all, [variable for _, variable in own]),
                *([[grad for grad, _ in own], *shared], device),
                jit_compile=jit_compile,
            )

    def update_all(
        variables: Sequence[Any], grads: Sequence[Any], count: Any, rate: Any
    ) -> None:
        with _set(inner, _iterations=count, _learning_rate=rate):
            decay([decayed[id(own)] for own in variables if id(own) in decayed])
            for grad, variable in zip(grads, variables, strict=True):
                inner.update_step(grad, variable, rate)

    def note(variables: Sequence[Any]) -> None:
        decayed.update((id(tf_variable(own)), own) for own in variables)

    replaced = {
        "_distributed_tf_update_step": update,
        "_apply_weight_decay": note,
        # For strategies; it would move all gradients to one device.
        "_all_reduce_sum_gradients": list,
    }
    with _set(inner, **replaced):
        yield


@contextmanager
def _set(optimizer: Any, **values: Any) -> Iterator[None]:
    """Sets attributes of an optimizer temporarily, bypassing Keras's tracking."""
    own = vars(optimizer)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            del own[name]
        own.update(before)


def _apply_compiled(optimizer: Any, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Applies gradients in functions that XLA compiles, one per device."""
    if not (traces_function() and orders_effects()):
        raise RuntimeError(
            "jit_compile=True compiles an update that is part of a tf.function; apply "
            "the gradients in one."
        )
    variables = [variable for _, variable in pairs]
    devices = _devices_of(variables)
    if len(devices) == 1:

        def update(grads: Sequence[Any]) -> None:
            apply_pairs(optimizer, list(zip(grads, variables, strict=True)))

        [device] = devices
        _call(update, [[grad for grad, _ in pairs]], device, jit_compile=True)
    elif kind_of(optimizer) is OptimizerKind.KERAS_3:
        _apply_keras_3(optimizer, pairs, jit_compile=True)
    else:
        raise ValueError(
            f"jit_compile=True: {type(optimizer).__name__} updates variables on "
            f"{sorted(devices)} at once, and XLA compiles for one device; use an "
            "optimizer of Keras 3, an optimizer for each device, or jit_compile=False."
        )


def _devices_of(variables: Sequence[Any]) -> set[str]:
    return {tf_variable(variable).device for variable in variables}


def _call(
    fn: Callable[..., None], arguments: list[Any], device: str, *, jit_compile: bool
) -> None:
    """Calls an update on its variables' device, compiled or not."""
    if not jit_compile:
        with tf.device(device):
            fn(*arguments)
        return
    place = partial(tf.device, device)
    call_once(fn, [arguments], [place], outside="", inline=False, jit_compile=True)


def _in_this_graph(grad: Any) -> Any:
    """Returns a dense, sparse or None gradient in tensors of the graph being built."""
    if grad is None or tf.executing_eagerly():
        return grad
    graph = tf.compat.v1.get_default_graph()
    is_sparse = isinstance(grad, tf.IndexedSlices)
    parts = (grad.values, grad.indices, grad.dense_shape) if is_sparse else (grad,)
    here = [
        own if own is None or getattr(own, "graph", None) is graph else tf.identity(own)
        for own in parts
    ]
    return tf.IndexedSlices(*here) if is_sparse else here[0]
