"""Keeps the variables of ``get_variable`` code in a ``tf.function``.

TensorFlow's own store lives in the graph, and every trace of a ``tf.function``
builds a new graph. This one belongs to the caller, lifts variables out of the trace,
and finds them again in every later one, through a public ``custom_getter``.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from tw_core._modes import traces_function
from tw_core._records.initial_values import InitialValue, initial_value, regularize
from tw_core._records.losses import note_variable
from tw_core._tf_compat import outermost_function_graph
from tw_core._towers import Tower, check_tower
from tw_core.devices._least_loaded import LeastLoadedDeviceSetter
from tw_core.devices._logical import check_devices
from tw_core.variables._policies import Replicated, Shared

_Key = tuple[int, str]


class VariableStore:
    """The variables of all towers, kept across the traces of ``tf.function``s.

    Names, shapes, dtypes, initializers, regularizers, constraints, ``trainable``
    and ``reuse`` work as in a session graph. ``collections``, ``use_resource``,
    ``caching_device`` and ``validate_shape`` are ignored.
    TensorFlow lets a function make variables in its first call only.
    """

    def __init__(self, policy: Shared | Replicated) -> None:
        """Starts empty.

        Args:
          policy: ``Shared()``: one set for all towers, on tower 0's device or
            spread over ``Shared(devices=...)``. ``Replicated()``: one set per tower,
            on its device; the other towers' variables start with the current
            values of tower 0's.

        Raises:
          TypeError: ``policy`` is neither of the two, such as the class ``Shared``.
        """
        if not isinstance(policy, Shared | Replicated):
            raise TypeError(
                "VariableStore: policy must be a Shared() or Replicated() object; got "
                f"{policy!r}."
            )
        self._policy = policy
        self._sets: dict[int, dict[str, tf.Variable]] = {}
        devices = policy.devices if isinstance(policy, Shared) else ()
        self._devices = devices
        self._setter = LeastLoadedDeviceSetter("", devices) if devices else None
        self._served: WeakKeyDictionary[tf.Graph, set[_Key]] = WeakKeyDictionary()

    @contextmanager
    def scope(self, tower: Tower) -> Iterator[None]:
        """Serves ``get_variable`` calls of ``tower`` made inside.

        Only ``reuse`` set inside counts: an outer setting may stem from eager code,
        where TensorFlow makes every scope reuse.

        Raises:
          RuntimeError: outside of a ``tf.function``.
          ValueError: a device this process does not have.
          TypeError: ``tower`` is not a ``Tower``.
        """
        check_tower(tower)
        if not traces_function():
            raise RuntimeError(
                "VariableStore.scope: serves get_variable inside a tf.function only; "
                "a session graph keeps its variables itself: use Shared().scope or "
                "Replicated().scope there."
            )
        check_devices([tower.device, *self._devices])
        v1 = tf.compat.v1
        shares = isinstance(self._policy, Shared)
        with v1.variable_scope(
            _scope_without_reuse(),
            reuse=True if shares and not tower.is_main else None,
            custom_getter=partial(self._get, tower),
            use_resource=True,
            auxiliary_name_scope=False,
        ):
            yield

    def variables(self, tower: Tower) -> list[tf.Variable]:
        """Lists the variables that ``tower`` uses, in order of creation."""
        check_tower(tower)
        return list(self._sets.get(self._owner(tower), {}).values())

    def trainable_variables(self, tower: Tower) -> list[tf.Variable]:
        """Lists the trainable ones among ``variables(tower)``."""
        return [v for v in self.variables(tower) if v.trainable]

    def _owner(self, tower: Tower) -> int:
        return 0 if isinstance(self._policy, Shared) else tower.index

    def _get(
        self, tower: Tower, getter: Callable[..., Any], name: str, **asked: Any
    ) -> tf.Variable:
        del getter  # TensorFlow's own would keep the variable in the trace's graph.
        key = name.removeprefix(f"{tower.name}/")  # a context's vs_name
        variables = self._sets.setdefault(self._owner(tower), {})
        self._check_reuse(tower, key, asked.get("reuse"))
        if key not in variables:
            full_name = name if tower.is_main else f"{tower.name}/{key}"
            with self._place(tower):
                variables[key] = self._make(tower, key, full_name, asked)
        _check_same(variables[key], tower, asked)
        note_variable(variables[key])
        self._serve_first(tower, key, asked.get("regularizer"))
        return variables[key]

    def _check_reuse(self, tower: Tower, name: str, reuse: object) -> None:
        exists = name in self._sets[self._owner(tower)]
        if reuse is True and not exists:
            raise ValueError(
                f"VariableStore: {tower.name} reuses the variable {name!r}, which does "
                "not exist; make it without reuse first."
            )
        if not reuse and (tower.index, name) in self._served_now():
            raise ValueError(
                f"VariableStore: {tower.name} makes the variable {name!r} twice; use "
                "another name, or reuse=True or tf.compat.v1.AUTO_REUSE to share it."
            )
        if not tower.is_main and name not in self._sets.get(0, {}):
            raise ValueError(
                f"VariableStore: {tower.name} makes the variable {name!r}, which "
                f"tower0 does not have; tower0 has {sorted(self._sets.get(0, {}))}. "
                "Build tower 0 first, and the same model in every tower."
            )

    def _make(
        self, tower: Tower, name: str, full_name: str, asked: dict[str, Any]
    ) -> tf.Variable:
        if asked.get("partitioner") is not None:
            raise ValueError(
                f"VariableStore: the variable {name!r} has a partitioner; partitioned "
                "variables work in a session graph only."
            )
        dtype = tf.as_dtype(asked.get("dtype") or tf.float32).base_dtype
        if tower.is_main:
            first = initial_value(
                name, asked.get("shape"), dtype, asked.get("initializer")
            )
        else:
            first = InitialValue(self._sets[0][name].read_value, None)
        passed_on = ("trainable", "constraint", "synchronization", "aggregation")
        return tf.Variable(
            first.value,
            dtype=first.dtype,
            name=full_name,
            **{key: asked[key] for key in passed_on if key in asked},
        )

    @contextmanager
    def _place(self, tower: Tower) -> Iterator[None]:
        with ExitStack() as scopes:
            scopes.enter_context(tf.init_scope())
            scopes.enter_context(tf.device(tower.device))
            if self._setter is not None:
                scopes.enter_context(tf.variable_creator_scope(self._setter.create))
            yield

    def _serve_first(self, tower: Tower, name: str, regularizer: Any) -> None:
        # One loss per variable and trace; a session graph adds it at creation.
        served = self._served_now()
        shares = isinstance(self._policy, Shared)
        is_first = not any(
            made == name and (shares or index == tower.index) for index, made in served
        )
        served.add((tower.index, name))
        if is_first and regularizer is not None:
            regularize(self._sets[self._owner(tower)][name], name, regularizer)

    def _served_now(self) -> set[_Key]:
        return self._served.setdefault(outermost_function_graph(), set())


def _scope_without_reuse() -> Any:
    # A trace inherits the eager scope around it, which is AUTO_REUSE once anything
    # has asked for it; making a name twice would then go unnoticed.
    v1 = tf.compat.v1
    scope = v1.get_variable_scope()
    return v1.VariableScope(
        reuse=False,
        name=scope.name,
        name_scope=scope.original_name_scope,
        initializer=scope.initializer,
        regularizer=scope.regularizer,
        caching_device=scope.caching_device,
        partitioner=scope.partitioner,
        custom_getter=scope.custom_getter,
        dtype=scope.dtype,
        use_resource=scope.use_resource,
        constraint=scope.constraint,
    )


def _check_same(variable: tf.Variable, tower: Tower, asked: dict[str, Any]) -> None:
    shape, dtype = asked.get("shape"), asked.get("dtype")
    if shape is None:  # then the dtype is the scope's default, not one asked for
        return
    same_dtype = dtype is None or variable.dtype == tf.as_dtype(dtype).base_dtype
    if not (same_dtype and variable.shape.is_compatible_with(shape)):
        raise ValueError(
            f"VariableStore: the variable {variable.name!r} has the shape "
            f"{variable.shape} and dtype {variable.dtype.name}; {tower.name} asks for "
            f"{tf.TensorShape(shape)} and {tf.as_dtype(dtype or variable.dtype).name}."
        )
