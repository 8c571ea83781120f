"""Each tower's counterparts of the items that a traced function was given.

The function sees the first tower's items. Another tower's tensors are passed as
arguments, and its variables are found by their position in the items: in Keras models
and optimizers, in ``tf.Module``s, in lists.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tw_core._variable_kinds import is_variable, tf_variables


@dataclass(frozen=True)
class Copies:
    """The items of K towers, taken apart.

    ``items[k]`` has one leaf per place: ``tensors`` lists the places of tensors, whose
    components are the function's arguments.
    """

    structure: Any
    items: list[list[Any]]  # [K] lists of leaves
    tensors: list[int]
    variables: list[list[Any]]  # [K] lists of variables, equal ones at one place
    handles: list[list[tf.Tensor]]  # of the variables

    @classmethod
    def of(cls, items: Sequence[Sequence[Any]]) -> "Copies":
        """Reads the items of K towers, which must match."""
        _check_structures(items)
        leaves = [tf.nest.flatten(list(own)) for own in items]
        alone = {id(leaf) for own in leaves for leaf in own if is_variable(leaf)}
        tensors = []
        variables: list[list[Any]] = [[] for _ in items]
        for place, column in enumerate(zip(*leaves, strict=True)):
            are_variables = [id(leaf) in alone for leaf in column]
            if not any(are_variables) and all(
                tf.is_tensor(leaf) or isinstance(leaf, np.ndarray | np.generic)
                for leaf in column
            ):
                tensors.append(place)
                continue
            found = [
                [leaf] if is_alone else _variables_of(leaf)
                for leaf, is_alone in zip(column, are_variables, strict=True)
            ]
            if all(own is not None for own in found):
                for own, more in zip(variables, found, strict=True):
                    own.extend(more or ())
            else:
                _check_same(column)
        _check_variables(variables)
        # A view has no memory: reading it reads the flat variable that it is part of.
        handles = [
            [getattr(own, "holder", own).handle for own in tf_variables(of_tower)]
            for of_tower in variables
        ]
        return cls(list(items[0]), leaves, tensors, variables, handles)

    def arguments(self, k: int) -> list[Any]:
        """Lists tower k's tensors, in components."""
        chosen = [self.items[k][place] for place in self.tensors]
        parts = tf.nest.flatten(chosen, expand_composites=True)
        return [p if tf.is_tensor(p) else tf.convert_to_tensor(p) for p in parts]

    def specs(self, arguments: Sequence[Sequence[Any]]) -> list[tf.TensorSpec]:
        """Returns the least general specs of [K] lists of arguments."""
        found = []
        for column in zip(*arguments, strict=True):
            first, *others = [tf.TensorSpec(own.shape, own.dtype) for own in column]
            found.append(first.most_specific_common_supertype(others))
            if found[-1] is None:
                raise TypeError(
                    "Towers that are traced once must get tensors of one dtype; got "
                    f"{[tensor.dtype.name for tensor in column]}."
                )
        return found

    def rebuilt(self, components: Sequence[Any]) -> list[Any]:
        """Returns the first tower's items with tensors made of ``components``."""
        like = [
            _common_type([own[place] for own in self.items]) for place in self.tensors
        ]
        tensors = tf.nest.pack_sequence_as(
            like, list(components), expand_composites=True
        )
        leaves = list(self.items[0])
        for place, tensor in zip(self.tensors, tensors, strict=True):
            leaves[place] = tensor
        packed: list[Any] = tf.nest.pack_sequence_as(self.structure, leaves)
        return packed

    def counterparts(self, k: int) -> dict[int, Any]:
        """Maps ids of the first tower's objects to tower k's counterparts."""
        found: dict[int, Any] = {}
        for own, other in zip(self.items[0], self.items[k], strict=True):
            found[id(own)] = other
        first, others = self.variables[0], self.variables[k]
        found |= zip(map(id, tf_variables(first)), tf_variables(others), strict=True)
        found |= zip(map(id, first), others, strict=True)
        return found


def _variables_of(leaf: Any) -> list[Any] | None:
    """Lists the variables of a leaf; None where it has none to list."""
    names = ("variables", "trainable_variables")
    name = next((name for name in names if hasattr(leaf, name)), None)
    if name is None or isinstance(leaf, type):
        return None
    variables = getattr(leaf, name)
    variables = list(variables() if callable(variables) else variables)
    if isinstance(leaf, tf.compat.v1.train.Optimizer):
        variables.sort(key=_by_number)
    return variables


def _by_number(variable: tf.Variable) -> list[tuple[str, int]]:
    """Sorts names in numeric order: a v1 optimizer puts "w_10" before "w_9"."""
    parts = re.findall(r"(\D+)(\d*)", variable.name)
    return [(word, int(number or 0)) for word, number in parts]


def _common_type(column: Sequence[Any]) -> tf.TypeSpec:
    """Returns the type of all towers' tensors: they may differ in shape."""
    tensors = [own if tf.is_tensor(own) else tf.constant(own) for own in column]
    first, *others = map(tf.type_spec_from_value, tensors)
    return first.most_specific_common_supertype(others) or first


def _check_structures(items: Sequence[Sequence[Any]]) -> None:
    for k, own in enumerate(items[1:], start=1):
        try:
            tf.nest.assert_same_structure(list(items[0]), list(own))
        except (ValueError, TypeError) as error:
            raise ValueError(
                "Towers that are traced once must get items of the same structure; "
                f"those of towers 0 and {k} differ: {error}"
            ) from None


def _check_same(column: Sequence[Any]) -> None:
    """Refuses Python values that differ: only the first would be seen."""
    first = column[0]
    if all(other is first for other in column):
        return
    try:
        are_equal = all(type(o) is type(first) and bool(o == first) for o in column)
    except (TypeError, ValueError):
        are_equal = False
    if not are_equal:
        raise ValueError(
            f"A function that is traced once sees tower 0's {first!r:.80} in every "
            f"tower; got {[f'{other!r:.80}' for other in column]}. Pass values that "
            "differ as tensors, variables as tf.Module, Keras objects or lists, or use "
            "trace='each'."
        )


def _check_variables(variables: Sequence[Sequence[Any]]) -> None:
    """Refuses copies whose variables differ, naming all of these."""
    counts = [len(own) for own in variables]
    if len(set(counts)) > 1:
        raise ValueError(
            f"Towers that are traced once must have the same variables; got {counts} "
            f"of them in towers 0..{len(counts) - 1}: "
            f"{[[v.name for v in own] for own in variables]}."
        )
    columns = [
        [
            f"{v.name} {v.dtype if isinstance(v.dtype, str) else v.dtype.name} "
            f"{tuple(v.shape)}{'' if v.trainable else ' (not trainable)'}"
            for v in column
        ]
        for column in zip(*variables, strict=True)
    ]
    different = [
        f"number {n}: {kinds}"
        for n, kinds in enumerate(columns)
        if len({kind.partition(" ")[2] for kind in kinds}) > 1
    ]
    if different:
        raise ValueError(
            "The variables of towers that are traced once must agree in shape, dtype "
            f"and trainability; got {'; '.join(different)}."
        )
