"""Optimizers of every kind: telling them apart, making their slots, applying gradients.

Programs use TensorFlow's v1 optimizers, tf_keras's new and legacy ones, Keras 3's,
and classes that follow the v1 interface. They differ in the variables they take, in
whether they sum rows of a sparse gradient that share an index, in how they make their
slots, and in whether their update is an op that a session can run.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from enum import Enum
from functools import partial
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf

from tw_core._modes import orders_effects, traces_function, without_autograph
from tw_core._tracing import call_once
from tw_core._variable_kinds import CALLS, is_variable, tf_variable, tf_variables
from tw_core.flat_variables import slots_like_parts
from tw_core.flat_variables._flat_variables import flat_among
from tw_core.gradients._values import with_unique_rows

__all__ = [
    "OptimizerKind",
    "OptimizerLike",
    "TowerOptimizerLike",
    "apply_pairs",
    "are_alike",
    "check_elementwise",
    "check_optimizer",
    "create_slots",
    "keep_repeated_rows",
    "kind_of",
]

_keeps_rows = ContextVar("_keeps_rows", default=False)


@runtime_checkable
class OptimizerLike(Protocol):
    """The optimizer that every package takes: TensorFlow's v1 interface, as a type.

    ``tf.compat.v1.train.Optimizer`` and its subclasses have it, tf_keras's legacy
    optimizers do not; ``tw-ampopt``'s has it too, and so works wherever a v1
    optimizer does.
    """

    def compute_gradients(
        self, loss: Any, var_list: Sequence[tf.Variable] | None = None
    ) -> list[tuple[Any, tf.Variable]]:
        """Returns [N] (gradient or None, variable) pairs of a scalar loss."""
        ...

    def apply_gradients(
        self,
        grads_and_vars: Any,
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> Any:
        """Returns the op that applies [N] (gradient, variable) pairs."""
        ...

    def get_slot(self, var: tf.Variable, name: str) -> tf.Variable | None:
        """Returns the slot ``name`` of ``var``, or None."""
        ...

    def get_slot_names(self) -> list[str]:
        """Returns the names of the slots."""
        ...

    def variables(self) -> list[tf.Variable]:
        """Returns the optimizer's own variables, slots included."""
        ...


@runtime_checkable
class TowerOptimizerLike(Protocol):
    """An optimizer that takes the gradients of all towers and reduces them itself.

    ``tw_ampopt.TowerOptimizer`` is one: it scales losses, accumulates and skips.
    """

    def apply_loss_scaling(self, value: Any) -> Any:
        """Returns the scaled loss, which is the one to differentiate."""
        ...

    def apply(self, grads: Any, *, weights: Sequence[Any] | None = None) -> Any:
        """Applies [K][N] gradients of scaled losses; tower k weighs ``weights[k]``."""
        ...


class OptimizerKind(Enum):
    """The families of optimizers.

    Attributes:
      V1: ``tf.compat.v1.train.Optimizer`` and its subclasses.
      LIKE_V1: another class that has the interface ``OptimizerLike``.
      KERAS_3: an optimizer of Keras 3.
      TF_KERAS: a new optimizer of tf_keras; it updates nothing in a session graph.
      TF_KERAS_LEGACY: one of ``tf_keras.optimizers.legacy``.
      OTHER: none of these.
    """

    V1 = "tf.compat.v1.train"
    LIKE_V1 = "tw_core.OptimizerLike"
    KERAS_3 = "keras"
    TF_KERAS = "tf_keras"
    TF_KERAS_LEGACY = "tf_keras.optimizers.legacy"
    OTHER = "other"


def kind_of(optimizer: object) -> OptimizerKind:
    """Returns an optimizer's kind, without importing Keras or tf_keras.

    An object of no known family is ``OTHER``, and so is a class.
    """
    if isinstance(optimizer, type):
        return OptimizerKind.OTHER
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return OptimizerKind.V1
    homes = [base.__module__ for base in type(optimizer).__mro__]
    packages = {home.split(".")[0] for home in homes}
    if "keras" in packages:
        return OptimizerKind.KERAS_3
    if "tf_keras" in packages:
        is_legacy = any(".legacy" in home for home in homes)
        return OptimizerKind.TF_KERAS_LEGACY if is_legacy else OptimizerKind.TF_KERAS
    if isinstance(optimizer, OptimizerLike):
        return OptimizerKind.LIKE_V1
    return OptimizerKind.OTHER


_WITHOUT_OP = {
    OptimizerKind.KERAS_3: (
        "a Keras 3 optimizer, does not work in a session graph; use one of "
        "tf.compat.v1.train, a tf_keras legacy optimizer, or tw_ampopt.Optimizer, "
        "which wraps it; or train in a tf.function."
    ),
    OptimizerKind.TF_KERAS: (
        "an optimizer of tf_keras, updates nothing in a session graph; use the one of "
        "the same name in tf_keras.optimizers.legacy, or one of tf.compat.v1.train."
    ),
}


def check_optimizer(optimizer: Any) -> None:
    """Refuses non-optimizers, and optimizers that a session graph cannot use.

    Args:
      optimizer: the argument to check.

    Raises:
      TypeError: a class; an object without ``apply_gradients``; or, where ops are
        built for a session to run, an optimizer whose update is not an op: one
        from Keras 3, or a new one from tf_keras.
    """
    is_class = isinstance(optimizer, type)
    if is_class or not callable(getattr(optimizer, "apply_gradients", None)):
        got = (
            f"the class {optimizer.__name__}" if is_class else type(optimizer).__name__
        )
        raise TypeError(
            "optimizer must be an object with apply_gradients(pairs), as "
            f"tf.compat.v1.train.AdamOptimizer() is; got {got}."
        )
    # A function that a session graph calls orders effects; a branch of it does not.
    if not orders_effects() and (advice := _WITHOUT_OP.get(kind_of(optimizer))):
        raise TypeError(f"{type(optimizer).__name__}, {advice}")


@without_autograph
def create_slots(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes an optimizer's state before its first update.

    Left to the first update, the state would be made inside the step: a
    ``tf.function`` is traced a second time for it, and in a loop or branch it cannot
    be made. Here it is made outside of any function, branch or loop being built, on
    the caller's device and under its name scope. Nothing is updated, and a session
    graph gets only the ops of the state.

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
            f"and a session graph takes no names such as {variables[0].name!r}. Pass "
            "keras.Variable objects, whose names have no colon, or train in a "
            "tf.function."
        ) from error


def _trace_unused_update(optimizer: Any, variables: Sequence[Any]) -> None:
    scope = tf.get_current_name_scope()

    def update() -> None:
        # A traced function starts without a scope; names show whose state it is.
        with tf.name_scope(f"{scope}/" if scope else ""):
            plain = tf_variables(variables)
            optimizer.apply_gradients([(tf.zeros_like(v), v) for v in plain])

    tf.function(update, autograph=False).get_concrete_function()


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
    branch or loop being built are brought into it, where Keras requires that. Where
    effects are not ordered, as in a session graph, nothing is updated before all
    gradients are computed: until then some may still have to read the variables.

    Args:
      optimizer: of any kind.
      pairs: [N] (gradient or None, variable).
      name: of the update op; None for the optimizer's own. Keras 3 ignores it.
      jit_compile: in a ``tf.function``, whether XLA compiles the update, one function
        for each device that has variables.

    Returns:
      The op or tensor to depend on for the update to have happened; None where it
      happens by itself.

    Raises:
      ValueError: a flat variable for an optimizer that treats each variable as a whole;
        ``jit_compile`` for variables of several devices, unless Keras 3's optimizer
        updates them.
      RuntimeError: ``jit_compile`` outside of ``tf.function``.
    """
    kind = kind_of(optimizer)
    variables = [variable for _, variable in pairs]
    check_elementwise(optimizer, variables)
    if jit_compile:
        _apply_compiled(optimizer, pairs)
        return None
    if kind is OptimizerKind.KERAS_3:
        with _once_known([grad for grad, _ in pairs]):
            return _apply_keras_3(optimizer, pairs)
    plain = list(zip([g for g, _ in pairs], tf_variables(variables), strict=True))
    if kind is not OptimizerKind.V1:
        plain = [(_in_this_graph(grad), variable) for grad, variable in plain]
    named = {} if name is None else {"name": name}
    with slots_like_parts(variables), _once_known([grad for grad, _ in plain]):
        return optimizer.apply_gradients(plain, **named)


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


def are_alike(optimizers: Sequence[Any]) -> bool:
    """Returns whether one optimizer's update does what every other one's does.

    Args:
      optimizers: of any kind, with their state made; at least one.

    Returns:
      True where all have one class, equal settings, and variables of equal shapes and
      dtypes. False where this cannot be seen.
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
    """Returns what an update depends on besides state; objects stand for themselves."""
    settings = {name: _setting(value) for name, value in vars(optimizer).items()}
    for name in ("name", "_name"):
        settings.pop(name, None)
    if not hasattr(optimizer, "get_config"):
        # Of TensorFlow 1, `_lr_t` and the like are tensors of the last update.
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
    # Tensors and arrays have no single answer to being equal.
    return _Same(id(config)) if hasattr(config, "shape") else config


class _Same(int):
    """The identity of an object."""


def _setting(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return frozenset(value)
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, dict | list | tuple) or is_variable(value):
        return None  # state, which is compared by itself
    return _Same(id(value))


# By class name, since several libraries have their own.
_WHOLE_VARIABLE = {
    "adafactor": "factors each variable's squares by rows and columns",
    "lamb": "scales each variable's update by its norm",
    "lars": "scales each variable's update by its norm",
    "muon": "treats each variable as a matrix",
    "novograd": "keeps one square per variable",
    "shampoo": "treats each variable as a matrix",
    "yogi_lamb": "scales each variable's update by its norm",
}


@contextmanager
def keep_repeated_rows() -> Iterator[None]:
    """Makes ``apply_pairs`` pass sparse gradients to Keras 3 optimizers unchanged.

    For results that must equal Keras's own: on one device it squares rows that share
    an index one by one.
    """
    token = _keeps_rows.set(True)
    try:
        yield
    finally:
        _keeps_rows.reset(token)


def check_elementwise(optimizer: Any, variables: Sequence[Any]) -> None:
    """Refuses flat variables for an optimizer that treats each variable as a whole."""
    flat = [own.name for own in flat_among(variables)]
    if not flat:
        return
    for one in _with_wrapped(optimizer):
        reason = _why_not_elementwise(one)
        if reason is not None:
            raise ValueError(
                f"{type(one).__name__} {reason}, and {', '.join(flat)} holds several; "
                "leave them alone (below_bytes=0 or group=...)."
            )


def _why_not_elementwise(optimizer: Any) -> str | None:
    bases = [base.__name__.lower() for base in type(optimizer).__mro__]
    for name in (base.removesuffix("optimizer") for base in bases):
        if name in _WHOLE_VARIABLE:
            return _WHOLE_VARIABLE[name]
    if getattr(optimizer, "clipnorm", None) is not None:
        return "clips each variable's gradient by its norm (clipnorm)"
    by_name = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
    if any(getattr(optimizer, own, None) for own in by_name):
        return "leaves variables out of the weight decay by their names"
    return None


def _with_wrapped(optimizer: Any) -> list[Any]:
    """Lists an optimizer and those that it wraps, as a loss scale optimizer does."""
    found = [optimizer]
    for name in ("inner_optimizer", "_optimizer", "optimizer", "_opt"):
        inner = getattr(optimizer, name, None)
        if callable(getattr(inner, "apply_gradients", None)) and inner not in found:
            found.extend(_with_wrapped(inner))
    return found


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
    return tf.function(update, autograph=False)()


@contextmanager
def _updates_where_variables_are(
    optimizer: Any, variables: Sequence[Any], *, jit_compile: bool = False
) -> Iterator[None]:
    """Makes Keras 3 update the variables of each device there, and all together.

    By itself it computes all updates on the device that it is called on, to which
    variables, slots and gradients would be copied from other devices. What they share
    is copied to each device once: the learning rate and the count of updates.
    """
    if len(_devices_of(variables)) == 1:
        yield
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a loss scaler
    decay, decayed = inner._apply_weight_decay, dict[int, Any]()

    def update(strategy: Any, pairs: Sequence[tuple[Any, Any]], rate: Any) -> None:
        of_device = defaultdict(list)
        for grad, variable in pairs:
            of_device[tf_variable(variable).device].append((grad, variable))
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
        # Of a strategy's; it would take all gradients to one device.
        "_all_reduce_sum_gradients": lambda pairs: pairs,
    }
    with _set(inner, **replaced):
        yield


@contextmanager
def _set(optimizer: Any, **values: Any) -> Iterator[None]:
    """Sets attributes of an optimizer for a while, unseen by what tracks them."""
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
    """Applies gradients in functions that XLA compiles, one a device."""
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
    """Calls what updates variables of a device there, compiled or as it is."""
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

    def brought_in(tensor: Any) -> Any:
        is_here = getattr(tensor, "graph", None) is graph
        return tensor if is_here else tf.identity(tensor)

    if not isinstance(grad, tf.IndexedSlices):
        return brought_in(grad)
    parts = (grad.values, grad.indices, grad.dense_shape)
    return tf.IndexedSlices(*(p if p is None else brought_in(p) for p in parts))
