"""An optimizer's state in shards, each on one tower of one rank.

    this rank's gradients                       [N], added over its towers
        reduce-scatter                          each rank gets the sums of its shards
    an optimizer of this rank's shards          has slots for these alone
        all-gather                              values of all shards, on all ranks
    every tower's copies of the variables

Both halves together send as many bytes as an all-reduce of the gradients. A shard of a
whole variable is its tower's copy; a shard of rows is a separate variable, which takes
the copy's values before each update.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any

import tensorflow as tf

from tw_builders._over_ranks.plan import Shard, plan_shards
from tw_core import Tower
from tw_core.internal import (
    all_gather,
    apply_pairs,
    create_slots,
    cut_flat,
    join_flat,
    map_values,
    plan_buckets,
    reduce_scatter,
    tf_variable,
    updates_elementwise,
    values_of,
)
from tw_core.ranks import RankGroup

_log = logging.getLogger(__name__)


class RankShards:
    """This rank's shards of [N] variables, of which K towers have copies.

    Builds ``optimizer``, of Keras 3, over them.
    """

    def __init__(
        self,
        group: RankGroup,
        towers: Sequence[Tower],
        columns: Sequence[Sequence[Any]],
        optimizer: Any,
    ) -> None:
        """Takes [K][N] copies; all ranks do, with the same K."""
        self.group, self.columns, self.optimizer = group, columns, optimizer
        self._device = towers[0].device
        variables = [tf_variable(own) for own in columns[0]]
        self.shapes = [tuple(own.shape.as_list()) for own in variables]
        self._places = {id(own): n for n, own in enumerate(variables)}
        self.plan = _planned(group, len(towers), columns[0], self.shapes, optimizer)
        self.own = [shard for shard in self.plan if shard.rank == group.rank]
        with tf.init_scope():
            made = [
                _variable_of(s, columns[s.tower][s.variable], towers) for s in self.own
            ]
            # A rank without any shard counts updates like the others.
            with tf.device(self._device):
                idle = _like(columns[0][0], tf.zeros([1]), "no_variable")
            self.variables = [*made, idle]
            with tf.device(self._device):
                create_slots(optimizer, self.variables)
        _exclude_alike(optimizer, self)

    def place_of(self, variable: Any) -> int:
        """Returns the place of one of tower 0's variables."""
        place = self._places.get(id(tf_variable(variable)))
        if place is None:
            raise ValueError(
                f"Unknown variable: {variable.name}. {type(self.optimizer).__name__} "
                "has state for the variables it was first built for; make a new one."
            )
        return place

    def reduce(self, grads: Sequence[Any], *, name: str) -> list[Any]:
        """Adds gradients over the ranks; returns those of this rank's shards.

        ``grads``: [N] or None. Rows of sparse ones are sent to all ranks.
        """
        rows = [n for n, grad in enumerate(grads) if isinstance(grad, tf.IndexedSlices)]
        dense = [None if n in rows else grad for n, grad in enumerate(grads)]
        sparse: list[Any] = [None] * len(grads)
        if rows:
            names = [unnumbered(self.columns[0][n]) for n in rows]
            sums = self.group.sum([grads[n] for n in rows], names=names)
            for n, total in zip(rows, sums, strict=True):
                sparse[n] = total
        # Ranks compare names: without one of another variable a part may be as long.
        name += self._without(grads)
        found = dict[Shard, Any]()
        known = {n: grad for n, grad in enumerate(dense) if grad is not None}
        for places, what in self._buckets(known):
            found |= self._reduce({n: known[n] for n in places}, f"{name}, {what}")
        pairs = zip(self.own, self.cut(sparse), strict=True)
        return [found.get(shard, grad) for shard, grad in pairs]

    def cut(self, grads: Sequence[Any]) -> list[Any]:
        """Returns this rank's shards of whole sums, [N], that all ranks have."""
        return [self._part_of(grads[shard.variable], shard) for shard in self.own]

    def _without(self, grads: Sequence[Any]) -> str:
        """Names the variables that have no gradient."""
        none = [n for n, grad in enumerate(grads) if grad is None]
        listed = [f"{n} ({unnumbered(self.columns[0][n])})" for n in none]
        return f", without variables {', '.join(listed)}" if none else ""

    def _buckets(self, tensors: Mapping[int, Any]) -> Iterator[tuple[list[int], str]]:
        """Yields the places of what is sent together, and what to call it.

        Tensors of a bucket have one dtype. Those of the last variables are the first:
        their gradients and new values are sent while others are computed.
        """
        of_dtype = defaultdict[Any, list[int]](list)
        for n in sorted(tensors):
            of_dtype[tensors[n].dtype].append(n)
        limit = getattr(self.group, "bucket_bytes", None)
        for dtype, places in of_dtype.items():
            sizes = {n: [0] * self.group.size for n in places}
            for own in (own for own in self.plan if own.variable in sizes):
                bytes_of = prod(own.shape(self.shapes[own.variable])) * dtype.size
                sizes[own.variable][own.rank] += bytes_of
            for number, bucket in enumerate(plan_buckets([*sizes.values()], limit)):
                what = f"{dtype.name}, bucket {number}" if number else dtype.name
                yield [places[m] for m in bucket], what

    def _reduce(self, grads: Mapping[int, Any], name: str) -> dict[Shard, Any]:
        """Adds gradients of one dtype, by the variables' places."""
        shards = [shard for shard in self.plan if shard.variable in grads]
        cut = _cut_into_shards(grads, shards)
        dtype = next(iter(grads.values())).dtype
        parts = []
        for rank in range(self.group.size):
            own = [cut[shard] for shard in shards if shard.rank == rank]
            parts.append(join_flat(own) if own else tf.zeros([0], dtype))
        total = reduce_scatter(self.group, parts, name=name)
        mine = [s for s in shards if s.rank == self.group.rank]
        shapes = [s.shape(self.shapes[s.variable]) for s in mine]
        sums = cut_flat(total, shapes) if shapes else []
        return dict(zip(mine, sums, strict=True))

    def _part_of(self, grad: Any, shard: Shard) -> Any:
        """Returns a shard's part of a whole gradient, or None."""
        if not isinstance(grad, tf.IndexedSlices):
            return (
                grad if grad is None or shard.rows is None else grad[slice(*shard.rows)]
            )
        shape = tf.constant(shard.shape(self.shapes[shard.variable]))
        if shard.rows is None:
            return tf.IndexedSlices(grad.values, grad.indices, shape)
        first, last = shard.rows
        kept = tf.logical_and(grad.indices >= first, grad.indices < last)
        return tf.IndexedSlices(
            tf.boolean_mask(grad.values, kept),
            tf.boolean_mask(grad.indices, kept) - first,
            shape,
        )

    def divided(self, sums: Sequence[Any], divisor: Any = None) -> list[Any]:
        """Divides reduced gradients, with x / 0 = 0; casts to the shards' dtypes."""

        def divide(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
            if divisor is not None:
                by = tf.cast(divisor, values.dtype)
                values = tf.math.divide_no_nan(values, by)
            return tf.cast(values, dtype)

        dtypes = [tf_variable(own).dtype for own in self.variables]
        return [
            g if g is None else map_values(partial(divide, dtype=dtype), g)
            for g, dtype in zip(sums, dtypes, strict=False)
        ]

    def update(
        self,
        grads: Sequence[Any],
        places: Sequence[int],
        *,
        name: str,
        jit_compile: bool = False,
        changes: tf.Tensor | None = None,
    ) -> None:
        """Updates this rank's shards, and sends the values to all towers of all ranks.

        ``grads``: the shards' reduced gradients, or None, but then for all shards of a
        variable, on all ranks. Variables at ``places`` have gradients. ``changes``:
        whether values change, and so are sent; None: they do.
        """
        self.refresh()
        pairs = [
            (grad, own)
            for grad, own in zip(grads, self.variables, strict=False)
            if grad is not None
        ]
        if not pairs:
            pairs = [(tf.zeros([1]), self.variables[-1])]
        is_whole = exchanges_in_update(self.optimizer)
        with (
            _seeing_all_gradients(self.optimizer, self.group, name),
            tf.device(self._device),
        ):
            apply_pairs(self.optimizer, pairs, jit_compile=jit_compile and not is_whole)
        if getattr(with_inner(self.optimizer)[-1], "ema_overwrite_frequency", None):
            places, changes = range(len(self.shapes)), None

        def give() -> tf.Tensor:
            self.give(places, name=f"variables, {name}")
            return tf.constant(True)

        if changes is None:
            give()
        else:
            tf.cond(changes, give, lambda: tf.constant(False))

    def finalize(self, finalize_values: Callable[[Sequence[Any]], None]) -> None:
        """Makes Keras finalize shards' values, such as averages, and sends them."""
        self.refresh()
        finalize_values(self.variables)
        if getattr(with_inner(self.optimizer)[-1], "use_ema", False):
            self.give(range(len(self.shapes)), name="averages")

    def refresh(self) -> None:
        """Assigns the copies' values to shards of rows."""
        for shard, variable in zip(self.own, self.variables, strict=False):
            if shard.rows is not None:
                copy = self.columns[shard.tower][shard.variable]
                plain = tf_variable(variable)
                with tf.device(plain.device):
                    plain.assign(_rows_of(copy, shard.rows))

    def begin_anew(self) -> None:
        """Resets slots to their first values, as variables have new values.

        Some optimizers' slots begin with the variables' values.
        """
        self.refresh()
        fresh = type(self.optimizer).from_config(self.optimizer.get_config())
        with tf.device(self._device):
            create_slots(fresh, self.variables)
        for own, new in zip(self.optimizer.variables, fresh.variables, strict=True):
            if own.shape and own.shape == new.shape:  # not counts, rates and scales
                own.assign(new)

    def give(self, places: Sequence[int], *, name: str) -> None:
        """Sends the values of variables at ``places`` to all towers of all ranks."""
        variables = {n: tf_variable(self.columns[0][n]) for n in places}
        for own, what in self._buckets(variables):
            self._give(set(own), variables[own[0]].dtype, name=f"{name}, {what}")

    def _give(self, places: set[int], dtype: tf.DType, *, name: str) -> None:
        ranks = range(self.group.size)
        shards = [
            [s for s in self.plan if s.rank == rank and s.variable in places]
            for rank in ranks
        ]
        shapes = [[s.shape(self.shapes[s.variable]) for s in own] for own in shards]
        values = [
            tf_variable(variable).read_value()
            for shard, variable in zip(self.own, self.variables, strict=False)
            if shard.variable in places
        ]
        own = join_flat(values) if values else tf.zeros([0], dtype)
        lengths = [sum(map(prod, of_rank)) for of_rank in shapes]
        flat = all_gather(self.group, own, lengths, name=name)
        for column in self.columns:
            with tf.device(tf_variable(column[0]).device):
                rows = defaultdict[int, list[Any]](list)
                for part, of_rank, own_shapes in zip(flat, shards, shapes, strict=True):
                    cut = cut_flat(part, own_shapes) if of_rank else []
                    for shard, value in zip(of_rank, cut, strict=True):
                        rows[shard.variable].append(value)
                for n, parts in rows.items():
                    value = parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)
                    tf_variable(column[n]).assign(value, read_value=False)


def _planned(
    group: RankGroup,
    num_towers: int,
    variables: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    optimizer: Any,
) -> tuple[Shard, ...]:
    may_cut = updates_elementwise(optimizer)
    sizes = [tf_variable(own).dtype.size for own in variables]
    plan = plan_shards(
        *(shapes, sizes),
        [may_cut and getattr(own, "constraint", None) is None for own in variables],
        num_ranks=group.size,
        num_towers=num_towers,
    )
    bytes_of = [prod(shape) * size for shape, size in zip(shapes, sizes, strict=True)]
    fair = sum(bytes_of) / (group.size * num_towers)
    large = [
        variables[s.variable].name
        for s in plan
        if s.rows is None and bytes_of[s.variable] > fair
    ]
    if large:
        _log.info(
            "%s: one tower of one rank has the whole state of %s, which is more than "
            "its share: separate updates of parts would give other results",
            *(type(optimizer).__name__, ", ".join(large)),
        )
    return plan


def with_inner(optimizer: Any) -> list[Any]:
    """Lists an optimizer and the one in it, if it scales the losses of another."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [optimizer] if inner is None else [optimizer, inner]


def unnumbered(variable: Any) -> str:
    """Returns a variable's name without the numbers that Keras counts per process."""
    name = getattr(variable, "path", variable.name).partition(":")[0]
    return re.sub(r"_\d+(?=[_/]|$)", "", name)


def check_holds_none(optimizer: Any) -> None:
    """Refuses an optimizer that holds several others."""
    inner = with_inner(optimizer)[-1]
    if hasattr(inner, "optimizers") and not hasattr(inner, "check_finite"):
        raise ValueError(
            f"{type(inner).__name__} holds several optimizers, each of some "
            "variables, of which a rank may have none; with state in shards over ranks "
            "use one optimizer for all variables."
        )


def _variable_of(shard: Shard, copy: Any, towers: Sequence[Tower]) -> Any:
    if shard.rows is None:
        return copy
    with tf.device(towers[shard.tower].device):
        value = _rows_of(copy, shard.rows)
        return _like(copy, value, copy.name.partition(":")[0])


def _rows_of(variable: Any, rows: tuple[int, int]) -> tf.Tensor:
    """Returns some rows of a variable."""
    first, last = rows
    if tf.executing_eagerly():
        # Not TensorFlow's slices: concurrent threads mix up each other's indices.
        return tf.constant(tf_variable(variable).numpy()[first:last])
    return tf_variable(variable).read_value()[first:last]


def _like(other: Any, value: tf.Tensor, name: str) -> Any:
    """Makes a variable of the other's kind: TensorFlow's or Keras's."""
    if isinstance(other, tf.Variable):
        return tf.Variable(value, name=name)
    made = type(other)(value, dtype=value.dtype.name, name=name)
    made._path = other.path  # by which optimizers tell variables apart
    made.overwrite_with_gradient = getattr(other, "overwrite_with_gradient", False)
    return made


def _exclude_alike(optimizer: Any, shards: RankShards) -> None:
    """Excludes shards from weight decay if their variables are excluded."""
    for own in with_inner(optimizer):
        excluded = getattr(own, "_exclude_from_weight_decay", None)
        for shard, variable in zip(shards.own, shards.variables, strict=False):
            copies = (shards.columns[0][shard.variable],)
            if excluded and any(own._var_key(copy) in excluded for copy in copies):
                excluded.add(own._var_key(variable))


def _cut_into_shards(
    grads: Mapping[int, Any], shards: Sequence[Shard]
) -> dict[Shard, tf.Tensor]:
    """Cuts whole gradients into those of shards."""
    of_variable = defaultdict[int, list[Shard]](list)
    for shard in shards:
        of_variable[shard.variable].append(shard)
    found: dict[Shard, tf.Tensor] = {}
    for n, own in of_variable.items():
        counts = [shard.rows[1] - shard.rows[0] for shard in own if shard.rows]
        parts = tf.split(grads[n], counts) if counts else [grads[n]]
        found |= dict(zip(own, parts, strict=True))
    return found


def exchanges_in_update(optimizer: Any) -> bool:
    """Returns whether an update depends on all gradients, so that ranks exchange."""
    return any(
        hasattr(own, "check_finite") or getattr(own, "global_clipnorm", None)
        for own in with_inner(optimizer)
    )


@contextmanager
def _seeing_all_gradients(
    optimizer: Any, group: RankGroup, name: str
) -> Iterator[None]:
    """Makes an optimizer of some variables clip and skip by all gradients."""

    def finite(check: Callable[..., Any]) -> Callable[..., Any]:
        def is_finite(grads: Any) -> Any:
            bad = tf.cast(tf.logical_not(check(grads)), tf.float32)
            (count,) = group.sum([bad], names=[f"{name}, whether finite"])
            return tf.equal(count, 0)

        return is_finite

    def clipping(norm: float) -> Callable[[Any], Any]:
        def clip(grads: Any) -> Any:
            wide = tf.float64 if grads[0].dtype == tf.float64 else tf.float32
            values = [tf.cast(values_of(grad), wide) for grad in grads]
            own = tf.add_n([tf.reduce_sum(one**2) for one in values])
            (total,) = group.sum([own], names=[f"{name}, norm"])
            # As in Keras, the norm is of rows, and their product with a scale is dense.
            grads = list(map(tf.convert_to_tensor, grads))
            clipped, _ = tf.clip_by_global_norm(grads, norm, use_norm=tf.sqrt(total))
            return clipped

        return clip

    with ExitStack() as stack:
        for own in with_inner(optimizer):
            if hasattr(own, "check_finite"):
                own.check_finite = finite(own.check_finite)
                stack.callback(delattr, own, "check_finite")
            if not own.clipnorm and own.global_clipnorm:
                own._clip_gradients = clipping(own.global_clipnorm)
                stack.callback(delattr, own, "_clip_gradients")
        yield
