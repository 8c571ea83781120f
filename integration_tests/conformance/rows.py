"""The rows of the conformance table: builders with their reducers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import keras
import tensorflow as tf
import tf_keras

import tw_ampopt
import tw_builders
import tw_reduce
from conformance.models import FLAT_BELOW, RATE, flat_group, optimizer
from conformance.programs import Copies, MakeOptimizer, in_function, in_session
from tw_core.testing import CPUS
from tw_reduce.reducers import CollectiveKeys

COUNTS = (1, 2, 3, 4, 8)
MODES = ("cpu", "gpu", "collective")  # for any number of towers
WAYS = ("shared", "sharded")  # in which towers have one optimizer
WAIT_S = 60.0
SGD = keras.optimizers.SGD
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "v1": optimizer,
    "tf_keras legacy": lambda decay, _: tf_keras.optimizers.legacy.SGD(
        RATE, momentum=decay
    ),
    "Keras 3": lambda decay, _: SGD(RATE, momentum=decay),
    "tw_ampopt, v1": lambda decay, _: tw_ampopt.Optimizer(
        tf_optimizer=tf.compat.v1.train.MomentumOptimizer,
        learning_rate=RATE,
        momentum=decay,
    ),
    "tw_ampopt, Keras 3": lambda decay, variables: tw_ampopt.TowerOptimizer(
        variables, tf_optimizer=SGD, learning_rate=RATE, momentum=decay
    ),
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    builder: str  # its name
    reducer: str  # the name of what adds, or "" where the builder adds by itself
    run: partial[Copies]  # takes the number of towers, and trains
    optimizer: str = "v1"  # a name in ``OPTIMIZERS``
    average: bool = True  # whether the gradient is the mean over towers, or the sum
    has_momentum: bool = True  # whether models of some kinds are trained with momentum
    densifies: bool = False  # whether sparse gradients of several towers become dense
    is_replicated: bool = True  # whether every tower has variables of its own
    counts: tuple[int, ...] = COUNTS  # of towers

    def moves_all_rows(self, num_towers: int) -> bool:
        """Whether the momentum of a table decays in rows without a gradient too."""
        is_dense = self.densifies and num_towers > 1
        return is_dense or self.optimizer.endswith("Keras 3")

    def is_compiled(self, kind: str, num_towers: int) -> bool:
        """Whether XLA compiles this update, in rows that run in a function."""
        if self.optimizer == "Keras 3":
            return True
        if kind == "sparse" and self.optimizer == "v1":
            return self.moves_all_rows(num_towers)
        is_on_one_device = self.run.keywords.get("is_flat") and "float16" in kind
        is_sharded = self.run.args[0] == "sharded"
        return num_towers == 1 or not is_sharded or bool(is_on_one_device)


def reducers(keys: CollectiveKeys) -> dict[str, Callable[[int], Any]]:
    """Name -> number of towers -> reducer of sums."""
    plain: dict[str, Callable[[int], Any]] = {
        "sum_on_device": lambda k: partial(tw_reduce.sum_on_device, device=CPUS[0]),
        "sum_round_robin": lambda k: partial(
            tw_reduce.sum_round_robin, devices=CPUS[:k]
        ),
        "sum_balanced": lambda k: partial(tw_reduce.sum_balanced, devices=CPUS[:k]),
        "hierarchical": lambda k: tw_reduce.hierarchical(groups(k), devices=CPUS[:k]),
        "sum_collective": lambda k: partial(
            tw_reduce.sum_collective,
            devices=CPUS[:k],
            keys=keys,
            timeout_s=WAIT_S,
        ),
        "auto": lambda k: tw_reduce.auto(CPUS[:k]),
    }
    balanced = plain["sum_balanced"]
    return {
        **plain,
        **{f"packed({name})": partial(packed, make) for name, make in plain.items()},
        "broadcast(sum_balanced)": lambda k: tw_reduce.broadcast(balanced(k)),
        "packed(broadcast(sum_balanced))": lambda k: packed(
            lambda k: tw_reduce.broadcast(balanced(k)), k
        ),
        "compress(sum_balanced, bfloat16)": lambda k: tw_reduce.compress(
            balanced(k), tf.bfloat16
        ),
        "accumulate_as(sum_balanced, float64)": lambda k: tw_reduce.accumulate_as(
            balanced(k), tf.float64
        ),
    }


def packed(make: Callable[[int], Any], num_towers: int) -> Any:
    return tw_reduce.packed(make(num_towers))


def groups(num_towers: int) -> list[list[int]]:
    """Two groups, unequal for an odd number of towers; one for a single tower."""
    towers = list(range(num_towers))
    middle = (num_towers + 1) // 2
    return [group for group in (towers[:middle], towers[middle:]) if group]


@cache
def rows() -> tuple[Row, ...]:
    return (
        *shared_rows(),
        *replicated_rows(),
        *sharded_rows(),
        *function_rows(),
        *flat_rows(),
        *other_optimizers(),
    )


def shared_rows() -> list[Row]:
    server = tw_builders.SyncMultiGPUParameterServerBuilder
    anyhow = tw_builders.AsyncMultiGPUBuilder
    found = [
        Row(
            f'{server.__name__}(ps_device="{place}")',
            "",
            partial(in_session, partial(server, ps_device=place), optimizer, True),
            is_replicated=False,
        )
        for place in ("cpu", "gpu")
    ]
    # Every tower's apply is a step to the optimizer: one without memory.
    for scales in (True, False):
        make = partial(anyhow, scale_gradient=scales)
        name = f"{anyhow.__name__}(scale_gradient={scales})"
        run = partial(in_session, make, optimizer, False)
        row = Row(
            name, "", run, average=scales, has_momentum=False, is_replicated=False
        )
        found.append(row)
    return found


def replicated_rows() -> list[Row]:
    """Means of all reducers, and sums by the older mode names."""
    makers = reducers(CollectiveKeys())
    found = [replicated_row(name, make, average=True) for name, make in makers.items()]
    for mode, counts in (*((m, COUNTS) for m in MODES), ("hierarchical", (8,))):
        name = f'"{mode}"'
        make = partial(lambda mode, _: mode, mode)
        found.append(replicated_row(name, make, average=False, counts=counts))
    return found


def replicated_row(
    name: str,
    make: Callable[[int], Any],
    *,
    average: bool,
    counts: tuple[int, ...] = COUNTS,
) -> Row:
    class_ = tw_builders.SyncMultiGPUReplicatedBuilder
    return Row(
        f"{class_.__name__}(average={average})",
        name,
        partial(in_session, partial(replicated, make, average), optimizer, True),
        average=average,
        densifies="collective" in name,
        counts=counts,
    )


def sharded_rows() -> list[Row]:
    """Means and sums, which owners add."""
    class_ = tw_builders.SyncMultiGPUShardedBuilder
    return [
        Row(
            f"{class_.__name__}(average={average})",
            "",
            partial(in_session, partial(class_, average=average), optimizer, True),
            average=average,
        )
        for average in (True, False)
    ]


def replicated(
    make: Callable[[int], Any], average: bool, devices: Any, **flat: Any
) -> Any:
    mode = make(len(devices))
    return tw_builders.SyncMultiGPUReplicatedBuilder(devices, average, mode, **flat)


def function_rows() -> list[Row]:
    """Sums of most reducers, means of some."""
    averaged = (
        "packed(broadcast(sum_balanced))",
        "hierarchical",
        "sum_collective",
        "auto",
    )
    found = [
        function_row(name, make, average=name in averaged)
        for name, make in reducers(CollectiveKeys()).items()
        if name != "broadcast(sum_balanced)"  # there also in packed
    ]
    return [
        *found,
        *(owned_row(w, average=a) for w in WAYS for a in (True, False)),
    ]


def function_row(
    name: str, make: Callable[[int], Any], *, average: bool, family: str = "v1"
) -> Row:
    reducer = partial(mean_of, make) if average else make
    return Row(
        "apply_gradients",
        f"mean({name})" if average else name,
        partial(in_function, "replicated", reducer, OPTIMIZERS[family]),
        family,
        average=average,
        densifies="collective" in name,
    )


def owned_row(way: str, *, average: bool, family: str = "v1") -> Row:
    """Variables that all towers share, or that are sharded."""
    name = f"apply_{way}_gradients(average={average})"
    run = partial(in_function, way, average, OPTIMIZERS[family])
    return Row(name, "", run, family, average=average, is_replicated=way != "shared")


def flat_rows() -> list[Row]:
    """Each way in which variables lie, with the small ones in flat ones."""
    name = "packed(broadcast(sum_balanced))"
    make = reducers(CollectiveKeys())[name]
    built = [shared_rows()[1], replicated_row(name, make, average=True)]
    called = [
        row
        for family in ("v1", "Keras 3")
        for row in (
            function_row(name, make, average=True, family=family),
            owned_row("sharded", average=True, family=family),
        )
    ]
    return [
        *map(flat_builder, [*built, sharded_rows()[0]]),
        *map(flat_function, [*called, owned_row("shared", average=True)]),
    ]


def flat_builder(row: Row) -> Row:
    make_builder, *others = row.run.args
    make_flat = partial(
        make_builder, flat_below_bytes=FLAT_BELOW, flat_group=flat_group
    )
    name = row.builder.replace(")", f", flat_below_bytes={FLAT_BELOW})")
    return replace(row, builder=name, run=partial(in_session, make_flat, *others))


def flat_function(row: Row) -> Row:
    run = partial(row.run, is_flat=True)
    return replace(row, builder=f"{row.builder} on flatten(…)", run=run)


def mean_of(make: Callable[[int], Any], num_towers: int) -> Any:
    return tw_reduce.mean(make(num_towers))


def other_optimizers() -> list[Row]:
    """The families that a mode takes beside TensorFlow's own, with one reducer."""
    found: list[Row] = []
    name = "packed(broadcast(sum_balanced))"
    make = reducers(CollectiveKeys())[name]
    for family in ("tf_keras legacy", "tw_ampopt, v1"):
        replicas = replicated_row(name, make, average=True)
        for row in (shared_rows()[0], replicas, sharded_rows()[0]):
            builder = row.run.args[0]
            run = partial(in_session, builder, OPTIMIZERS[family], True)
            found.append(replace(row, run=run, optimizer=family))
    for family in ("Keras 3", "tw_ampopt, Keras 3"):
        found.append(function_row(name, make, average=True, family=family))
        found += [owned_row(way, average=True, family=family) for way in WAYS]
    return [replace(row, counts=(1, 2, 3)) for row in found]
