"""Parts of flat variables for ``tf.compat.v1.train.Saver``, as separate variables."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import tensorflow as tf

from tw_core._flat_packs import cut_flat, join_flat
from tw_core._tf_compat import SaveableObject, SaveSpec
from tw_core._variable_kinds import plain_name


class SavedParts(SaveableObject):  # type: ignore[misc]
    """Saves and restores parts of a flat variable as separate variables."""

    def __init__(self, flat: tf.Variable) -> None:
        self._flat = self.op = flat
        self.name = plain_name(flat)
        self.numbers: set[int] = set()
        self.is_taken = False  # whether a saver has used it

    @cached_property
    def specs(self) -> list[Any]:
        """The specs to save, in the order of the parts."""
        self.is_taken, flat = True, self._flat
        with tf.device(flat.device):
            values = cut_flat(flat.variable.read_value(), flat.layout.shapes)
        return [
            SaveSpec(values[n], "", part.name, dtype=flat.dtype, device=flat.device)
            for n, part in enumerate(flat.layout.parts)
            if n in self.numbers
        ]

    def restore(
        self, restored_tensors: Sequence[tf.Tensor], restored_shapes: object
    ) -> tf.Operation:
        """Returns an op that assigns restored parts; all of them in one assignment."""
        del restored_shapes
        self.is_taken, flat = True, self._flat
        numbers, parts = sorted(self.numbers), flat.layout.parts
        # A checkpoint of another model fails here instead of shifting its neighbours.
        checked = [
            tf.ensure_shape(
                tensor, parts[n].shape, name=f"check_restored_shape/{parts[n].name}"
            )
            for tensor, n in zip(restored_tensors, numbers, strict=True)
        ]
        with tf.device(flat.device):
            if len(numbers) == len(parts):
                return flat.variable.assign(join_flat(checked), read_value=False)
            pairs = zip(numbers, checked, strict=True)
            return tf.group(*[flat.assign_part(n, value) for n, value in pairs])


class NotYetSaveable(SaveableObject):  # type: ignore[misc]
    """Saveable of an unbound view, which may be initialised from a checkpoint."""

    def __init__(self, view: tf.Variable) -> None:
        self._view = self.op = view
        self.name = plain_name(view)

    @property
    def specs(self) -> Any:
        """Refuses savers, which would save or restore now."""
        return self._view._bound("save")

    def restore(self, restored_tensors: object, restored_shapes: object) -> Any:
        """Does nothing: ``init_from_checkpoint`` sets the initial value as well."""
        return tf.no_op()
