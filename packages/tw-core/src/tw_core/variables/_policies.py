"""Policies for ``get_variable`` code in a graph: variables shared or replicated.

A policy is entered around the model code of one tower. ``VariableStore`` implements
the same two policies in ``tf.function``.

A checkpoint needs only one of the replicas' copies, so the variables of towers 1 and up
are local. All variables (from ``get_variable``, ``tf.Variable``, an optimizer's slots)
are made by a variable creator; they are moved between collections afterwards, because
TensorFlow 2's ``tf.Variable`` ignores ``collections``.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_core._checks import check_flag, check_list
from tw_core._records.origins import owning_tower, record_scope
from tw_core._towers import Tower, check_tower
from tw_core._variable_kinds import make_local
from tw_core.devices._least_loaded import LeastLoadedDeviceSetter
from tw_core.devices._logical import device_name, parse_device


@dataclass(frozen=True)
class Shared:
    """Tower 0 makes the variables; the other towers reuse them.

    Attributes:
      devices: where they live, each on the device with the fewest bytes so far;
        empty for the device in scope where tower 0 makes them.

    Raises:
      TypeError: ``devices`` is not a tuple.
      ValueError: a device string TensorFlow cannot read.
    """

    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.devices, str):
            raise TypeError(
                f"Shared: devices must be a tuple of device strings; got "
                f"{self.devices!r}. Write ({self.devices!r},)."
            )
        check_list(devices=self.devices, of="device strings", empty=True)
        names = tuple(map(device_name, self.devices))
        object.__setattr__(self, "devices", names)
        for device in names:
            parse_device(device)

    @contextmanager
    def scope(self, tower: Tower) -> Iterator[None]:
        """Builds ``get_variable`` code of ``tower`` under this policy.

        Raises:
          RuntimeError: in eager mode.
          TypeError: ``tower`` is not a ``Tower``.
        """
        check_tower(tower)
        _check_builds_a_graph(self)
        v1 = tf.compat.v1
        setter = LeastLoadedDeviceSetter(tower.device, self.devices or [""])
        with (
            v1.variable_scope(
                v1.get_variable_scope(),
                reuse=None if tower.is_main else True,
                auxiliary_name_scope=False,
            ),
            v1.device(setter if self.devices else ""),
        ):
            yield

    def trainable_variables(self, tower: Tower) -> list[tf.Variable]:
        """Lists the graph's trainable variables, which all towers share."""
        check_tower(tower)
        return list(tf.compat.v1.trainable_variables())


@dataclass(frozen=True)
class Replicated:
    """Every tower makes its own variables, prefixed with its name from tower 1 on.

    Those of towers 1 and up are local variables (and trainable where tower 0's
    are), so that a checkpoint holds the model once. They are initialised
    independently: run the op of ``copy_to_replicas`` after the initialisers.
    """

    @contextmanager
    def scope(self, tower: Tower) -> Iterator[None]:
        """Builds ``get_variable`` code of ``tower`` under this policy.

        Raises:
          RuntimeError: in eager mode.
          TypeError: ``tower`` is not a ``Tower``.
        """
        check_tower(tower)
        _check_builds_a_graph(self)
        if tower.is_main:
            with record_scope(0, ns_name=_name_scope_of(tower), vs_name=""):
                yield
            return
        v1 = tf.compat.v1
        with (
            v1.variable_scope(tower.name, auxiliary_name_scope=False) as scope,
            record_scope(
                tower.index,
                ns_name=_name_scope_of(tower),
                vs_name=scope.name,
                are_local=True,
            ),
        ):
            yield

    def trainable_variables(self, tower: Tower) -> list[tf.Variable]:
        """Lists the graph's trainable variables that are ``tower``'s own.

        Those made outside of towers are tower 0's. In an imported graph, which has
        no record, local ones belong to the ``tower<k>`` in their name.
        """
        check_tower(tower)
        variables = tf.compat.v1.trainable_variables()
        return [v for v in variables if owning_tower(v) == tower.index]


def _name_scope_of(tower: Tower) -> str:
    """Returns the open name scope of ``tower`` with its parents, or an empty string."""
    parts = tf.compat.v1.get_default_graph().get_name_scope().split("/")
    is_tower = [re.fullmatch(rf"{tower.name}(_\d+)?", part) for part in parts]
    depth = next((i + 1 for i, found in enumerate(is_tower) if found), 0)
    return "/".join(parts[:depth])


def _check_builds_a_graph(policy: Shared | Replicated) -> None:
    if tf.executing_eagerly():
        raise RuntimeError(
            f"{policy}.scope: get_variable keeps no variables in eager mode; use it "
            "in a session graph, or VariableStore(policy).scope in a tf.function."
        )


@contextmanager
def override_to_local_variable(enable: bool = True) -> Iterator[None]:
    """Puts variables made inside into LOCAL_VARIABLES instead of GLOBAL_VARIABLES.

    Their other collections stay, so a trainable variable stays trainable. A
    variable outside of GLOBAL_VARIABLES (made with its own ``collections``) is
    left as it is, and so are TensorFlow 2 variables outside of session graphs,
    which are in no collection.

    Args:
      enable: False makes this a no-op.

    Raises:
      ValueError: a reference variable is made inside.
      TypeError: ``enable`` is not a bool.
    """
    check_flag(enable=enable)
    if not enable:
        yield
        return
    with tf.variable_creator_scope(_create_local):
        yield


def _create_local(
    next_creator: Callable[..., tf.Variable], **kwargs: Any
) -> tf.Variable:
    variable = next_creator(**kwargs)
    make_local(variable)
    return variable
