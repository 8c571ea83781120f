"""The towers' memory of one variable, in variables that any K can restore."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core.internal import SaveableObject, SaveSpec
from tw_reduce._memory.protocol import StatefulReducer

_LOG = logging.getLogger("tw_reduce")


class Kept(
    tf.Module,  # type: ignore[misc] # TensorFlow is untyped
):
    """All towers' memory of one variable, which is a single object in a checkpoint."""

    def __init__(
        self,
        reducer: StatefulReducer,
        nests: Sequence[Any],
        tell: Callable[[int, int], None],
    ) -> None:
        super().__init__(name="memory")
        self._tell = tell  # of a start from zero, by the old and new number of towers
        self._resize: Callable[..., Any] | None = getattr(reducer, "resize", None)
        self.towers = [tf.nest.flatten(own) for own in nests]  # [K][leaves]
        # Bound, since TensorFlow wraps the dictionaries among a module's attributes.
        self._as_nest = partial(tf.nest.pack_sequence_as, nests[0])
        self._same_nest = partial(tf.nest.assert_same_structure, nests[0])

    def read(self, tower: int) -> Any:
        """Returns a tower's memory, in its nest."""
        return self._as_nest(list(map(_read, self.towers[tower])))

    def pairs(self, nests: Sequence[Any]) -> list[tuple[tf.Variable, Any]]:
        """Returns all towers' variables, each with its new value; checks the nests."""
        for k, nest in enumerate(nests):
            try:
                self._same_nest(nest)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    "update must return states nested as those of init; those of tower "
                    f"{k} differ: {error}"
                ) from None
        return [
            pair
            for own, nest in zip(self.towers, nests, strict=True)
            for pair in zip(own, tf.nest.flatten(nest), strict=True)
        ]

    def _trackable_children(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}  # The variables are saved by the methods below.

    def stacked(self) -> dict[str, tf.Tensor]:
        """Returns [K, ...] leaves by name."""
        columns = zip(*self.towers, strict=True)
        with tf.device("/device:CPU:0"):
            return {f"leaf_{i}": tf.stack(list(own)) for i, own in enumerate(columns)}

    def restore(
        self,
        leaves: dict[str, tf.Tensor],
        *,
        total: int | None = None,
        first: int = 0,
    ) -> tf.Operation:
        """Restores stacked leaves, divided among ``total``; takes K from ``first``."""
        own = [leaves[f"leaf_{i}"] for i in range(len(self.towers[0]))]
        wanted = total or len(self.towers)
        if own[0].shape.rank is None:  # in a session graph
            own = self._divided_in_run(own, wanted)
        count = own[0].shape[0]
        nests = self._unstacked(own)
        if count != wanted:
            if self._resize is None:
                self._tell(count, wanted)
                return tf.no_op()
            nests = self._resize(nests, wanted)
        pairs = self.pairs(nests[first : first + len(self.towers)])
        done = [variable.assign(new, read_value=False) for variable, new in pairs]
        return tf.group(*[own for own in done if own is not None])

    def _unstacked(self, leaves: Sequence[tf.Tensor]) -> list[Any]:
        columns = zip(*map(tf.unstack, leaves), strict=True)
        return [self._as_nest(list(own)) for own in columns]

    def _divided_in_run(
        self, leaves: Sequence[tf.Tensor], wanted: int
    ) -> list[tf.Tensor]:
        """Returns [wanted, ...] leaves; the number restored is known at run time."""
        dtypes, resize = [own.dtype for own in leaves], self._resize

        def divide(*leaves: tf.Tensor) -> list[tf.Tensor]:
            nests: Any = resize and resize(self._unstacked(leaves), wanted)
            columns = zip(*map(tf.nest.flatten, nests), strict=True)
            return [tf.stack(list(own)) for own in columns]

        def resized() -> list[tf.Tensor]:
            if resize is not None:
                return list(tf.py_function(divide, leaves, dtypes))
            told = tf.py_function(lambda n: self._tell(int(n), wanted), [count], [])
            columns = zip(*self.towers, strict=True)
            with tf.control_dependencies([told]):
                return [tf.stack([v.initial_value for v in own]) for own in columns]

        count = tf.shape(leaves[0])[0]
        fitting = tf.cond(tf.equal(count, wanted), lambda: list(leaves), resized)
        shapes = [[wanted, *own.shape] for own in self.towers[0]]
        return list(map(tf.ensure_shape, fitting, shapes))

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return self.stacked()

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> tf.Operation:
        return self.restore(restored)


class SavedCount(
    SaveableObject,  # type: ignore[misc] # TensorFlow is untyped
):
    """Saves the number of towers beside their variables, and refuses another one.

    A saver finds variables by name, and would leave out those of further towers.
    """

    def __init__(self, saved: tf.Tensor, count: int) -> None:
        name = saved.op.name  # An exported graph looks for an operation of this name.
        super().__init__(saved, [SaveSpec(saved, "", name)], name)
        self._count = count

    @classmethod
    def add(cls, scope: str, count: int) -> None:
        """Lets all savers of the graph save it that are made from now on."""
        with tf.device("/device:CPU:0"):
            saved = tf.constant(count, name=f"{scope}/towers")
        key = tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS
        tf.compat.v1.add_to_collection(key, cls(saved, count))

    def restore(
        self, restored_tensors: Sequence[tf.Tensor], restored_shapes: object
    ) -> tf.Operation:
        """Returns an op that fails if another number was saved."""
        del restored_shapes
        return tf.compat.v1.assert_equal(
            *(restored_tensors[0], self._count),
            message="A Saver restores a reducer's memory only for as many towers as it "
            "was saved for; tf.train.Checkpoint divides it among others. It has "
            f"{self._count} here, and in the file (x):",
        )


def _read(variable: tf.Variable) -> tf.Tensor:
    with tf.device(variable.device):  # The copy that is read would be elsewhere.
        return variable.read_value()


def tell_of_new_memory(count: int, wanted: int) -> None:
    """Logs that the memory of another number of towers is lost."""
    _LOG.warning(
        "A reducer's memory of %d towers does not fit %d towers: it starts from zero. "
        "Give the reducer a method resize(states, count) to divide it.",
        *(count, wanted),
    )
