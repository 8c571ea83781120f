"""``RankShardedOptimizer``: state in shards over ranks, in your own steps.

The first stage of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020).
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tw_builders._over_ranks.shards import (
    RankShards,
    check_holds_none,
    with_inner,
)
from tw_builders._over_ranks.state import gather, scatter, shared_state
from tw_builders._sharded_optimizer import own_variables, read_with_none
from tw_core import Tower
from tw_core.internal import (
    OptimizerKind,
    check_flag,
    check_kind,
    check_optimizer,
    check_weights,
    kind_of,
    map_values,
    scalar_of,
    tf_variable,
    values_of,
    weigh,
    weight_dtype,
    without_autograph,
)
from tw_core.ranks import RankGroup
from tw_reduce import sum_on_device

_NARROW = (tf.float16, tf.bfloat16)


class RankShardedOptimizer:
    """An optimizer whose state is in shards, each on one tower of one rank (ZeRO-1).

    Every variable belongs to one tower of one rank, and rows of a large one to several,
    so that all towers have about the same number of bytes of state. A step adds
    gradients where they are applied, and sends the new values to all towers of all
    ranks: as many bytes as an all-reduce of the gradients.

    All ranks create one with the same number of towers and equal variables, and call
    its methods in the same order. A rank without data calls ``apply`` with gradients of
    zeros, and with weights of 0.

    >>> import keras
    >>> import tensorflow as tf
    >>> import tw_ranks
    >>> from tw_core import towers
    >>> group = tw_ranks.join()
    >>> weights = [tf.Variable([1.0, 2.0])]
    >>> sgd = keras.optimizers.SGD(0.5, momentum=0.9)
    >>> ours = towers(["/cpu:0"])
    >>> optimizer = RankShardedOptimizer(ours, [weights], sgd, group=group)
    >>> optimizer.apply([[tf.constant([1.0, 2.0])]])
    >>> weights[0].numpy().tolist()
    [0.5, 1.0]
    >>> group.leave()

    Attributes:
      optimizer: the one given, with the state of this rank's shards. Set its learning
        rate on all ranks; scale losses with it, if it is a ``LossScaleOptimizer``.
    """

    def __init__(
        self,
        towers: Sequence[Tower],
        replicas: Sequence[Any],
        optimizer: Any,
        *,
        group: RankGroup,
    ) -> None:
        """Plans the shards, makes their state, and compares the ranks' plans.

        Args:
          towers: K towers of this rank.
          replicas: K models with ``trainable_variables``, or lists of N variables.
          optimizer: a new Keras 3 optimizer, which ``get_config()`` can reproduce. It
            updates rows of a large variable separately, except with ``clipnorm`` and
            for Adafactor, Lamb, Muon and your own classes: then one tower has the whole
            variable.
          group: the ranks, from ``tw_ranks.join``.

        Raises:
          ValueError: the numbers of replicas and towers differ; replicas that differ,
            share a variable or have one that is not on their tower's device; an
            optimizer that is already built, or holds several others; ranks with
            different numbers of towers, variables or optimizers.
          TypeError: an optimizer that is not a Keras 3 one, or another argument of the
            wrong kind.
          RuntimeError: in a ``tf.function`` or session graph.
        """
        self._columns = own_variables(towers, replicas)
        check_kind(RankGroup, "from tw_ranks.join, or have its methods", group=group)
        _check_eager("made")
        check_optimizer(optimizer)
        if kind_of(optimizer) is not OptimizerKind.KERAS_3:
            raise TypeError(
                "optimizer must be a Keras 3 one, such as keras.optimizers.Adam(); got "
                f"{type(optimizer).__name__}."
            )
        if optimizer.built:
            raise ValueError(
                f"optimizer is already built, for whole variables; pass a new "
                f"{type(optimizer).__name__}."
            )
        check_holds_none(optimizer)
        _compare_ranks(group, self._columns, optimizer)
        self.optimizer, self._towers, self._group = optimizer, towers, group
        self._shards = RankShards(group, towers, self._columns, optimizer)

    @without_autograph
    def apply(
        self,
        grads: Sequence[Sequence[Any]],
        *,
        average: bool = True,
        weights: Sequence[Any] | None = None,
        jit_compile: bool = False,
    ) -> None:
        """Adds the gradients of all towers of all ranks, and updates the variables.

        Call it in a ``tf.function`` or eagerly; wrap the function that calls it in
        ``group.bounded``.

        Args:
          grads: [K][N] gradients of this rank's towers, not reduced; tensors or
            ``IndexedSlices``, or None for a variable in all towers of all ranks. Sparse
            ones are sent to all ranks.
          average: whether to divide by the number of towers of all ranks.
          weights: [K] weight of each tower's gradients in the mean over all ranks, such
            as its rows; 0 excludes a tower, even one with NaN gradients. All ranks pass
            them, or None for equal weights.
          jit_compile: in a ``tf.function``, whether XLA compiles the update; no effect
            for an optimizer that needs all gradients (``global_clipnorm``,
            ``LossScaleOptimizer``).

        Raises:
          ValueError: numbers other than K or N; a gradient that is None in some of the
            towers, or on some of the ranks; gradients that differ between towers;
            weights without ``average``, or as ``tw_reduce.mean``.
          TypeError: something that is not a gradient or a list of them; in a session
            graph.
          RuntimeError: ``jit_compile`` outside of ``tf.function``.
        """
        check_flag(average=average)
        check_flag(jit_compile=jit_compile)
        check_weights(weights, num_towers=len(self._towers), average=average)
        check_optimizer(self.optimizer)  # in a session graph
        read = read_with_none(self._towers, grads, self._columns)
        used = [n for n, grad in enumerate(read[0]) if grad is not None]
        own = [[_wide(of_tower[n]) for n in used] for of_tower in read]
        if weights is not None:
            shares = self._shares(weights, weight_dtype(map(values_of, own[0])))
            own = [
                [weigh(grad, share) for grad in of_tower]
                for of_tower, share in zip(own, shares, strict=True)
            ]
        local: list[Any] = [None] * len(self._columns[0])
        if used:
            sums = sum_on_device(own, device=self._towers[0].device)[0]
            for n, total in zip(used, sums, strict=True):
                local[n] = total
        sums = self._shards.reduce(local, name="gradients")
        is_plain = average and weights is None
        number = len(self._towers) * self._group.size if is_plain else None
        reduced = self._shards.divided(sums, number)
        self._shards.update(reduced, used, name="update", jit_compile=jit_compile)

    def _shares(self, weights: Sequence[Any], dtype: tf.DType) -> list[tf.Tensor]:
        """Returns [K] parts of the mean over the towers of all ranks."""
        known = [scalar_of(weight, tf.float64) for weight in weights]
        [total] = self._group.sum([tf.add_n(known)], names=["weights"])
        return [tf.cast(tf.math.divide_no_nan(w, total), dtype) for w in known]

    def gather(self) -> Any:
        """Returns the state of all ranks as the plain optimizer, to save or restore it.

        ``tf.train.Checkpoint(model=replicas[0], optimizer=optimizer.gather())`` on rank
        0 then equals that of a model trained on one device.

        Returns:
          On rank 0 an optimizer of tower 0's variables, on the host, with a copy of the
          state; on other ranks None.

        Raises:
          RuntimeError: in a ``tf.function`` or session graph.
        """
        _check_eager("gathered")
        return gather(self._shards)

    def scatter(self, whole: Any) -> None:
        """Gives all ranks the state of rank 0's plain optimizer.

        Variables do not change: give the restored values to all towers of all ranks.

        Args:
          whole: on rank 0 the optimizer that ``gather`` returned, with restored state,
            or one that was built for tower 0's variables. Ignored on other ranks.

        Raises:
          TypeError: on rank 0, an optimizer of another class.
          ValueError: on rank 0, one that was built for other variables, or for none.
          RuntimeError: in a ``tf.function`` or session graph.
        """
        _check_eager("scattered")
        is_first = self._group.rank == 0
        if is_first:
            _check_whole(whole, self.optimizer, self._shards.shapes)
        scatter(self._shards, whole)
        own = shared_state(self.optimizer)
        of_first = shared_state(whole) if is_first else own
        told = [tf.cast(value, tf.float64) * is_first for value in of_first]
        names = [f"an optimizer's numbers {n}" for n in range(len(own))]
        for variable, value in zip(
            own, self._group.sum(told, names=names), strict=True
        ):
            variable.assign(tf.cast(value, tf_variable(variable).dtype))

    def finalize(self) -> None:
        """Replaces variables by their averages at the end, with Keras's ``use_ema``.

        Raises:
          RuntimeError: in a ``tf.function`` or session graph.
        """
        _check_eager("finalized")
        self._shards.finalize(self.optimizer.finalize_variable_values)


def _check_eager(done: str) -> None:
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"RankShardedOptimizer must be {done} outside of tf.function and session "
            "graphs; only apply may be called in a step."
        )


def _compare_ranks(
    group: RankGroup, columns: Sequence[Sequence[Any]], optimizer: Any
) -> None:
    """Refuses ranks whose shards would differ; all ranks call it."""
    plain = [tf_variable(own) for own in columns[0]]
    kinds = [type(own).__name__ for own in with_inner(optimizer)]
    described = [(own.shape.as_list(), own.dtype.name) for own in plain]
    told = zlib.crc32(repr((described, kinds)).encode())
    table = np.zeros([group.size, 3], np.int64)
    table[group.rank] = len(columns), len(plain), told
    (total,) = group.sum([tf.constant(table)], names=["towers and variables of ranks"])
    of_ranks = total.numpy().tolist()
    if any(own != of_ranks[0] for own in of_ranks):
        listed = "; ".join(
            f"rank {rank}: {towers} towers, {count} variables, checksum {told:08x}"
            for rank, (towers, count, told) in enumerate(of_ranks)
        )
        raise ValueError(
            "All ranks must have the same number of towers, variables of the same "
            "shapes and dtypes (see checksums), and the same kind of optimizer; got "
            f"{listed}."
        )


def _check_whole(whole: Any, own: Any, shapes: Sequence[tuple[int, ...]]) -> None:
    if type(whole) is not type(own):
        raise TypeError(
            "whole must be, on rank 0, the optimizer that gather returned, of class "
            f"{type(own).__name__}; got {type(whole).__name__}."
        )
    inner = with_inner(whole)[-1]
    built = [tuple(v.shape) for v in getattr(inner, "_trainable_variables", ())]
    if built != list(shapes):
        raise ValueError(
            f"whole must be built for tower 0's variables, of shapes {list(shapes)}; "
            f"got shapes {built}. Restore into the optimizer that gather returned."
        )


def _wide(grad: Any) -> Any:
    """Returns a gradient as it is sent: in float16 a sum may overflow."""
    is_narrow = values_of(grad).dtype in _NARROW
    return map_values(lambda v: tf.cast(v, tf.float32), grad) if is_narrow else grad
