"""All-reduce of whole gradient lists: our reducers, others', and lower bounds.

Every contender reads the same variables, and its results are fetched: if only a group
of operations were fetched, TensorFlow could prune the work. Every element is compared
with NumPy before anything is timed.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import racing
import tensorflow as tf
from profiles import PROFILES
from racing import Contender, Report, Timing, race
from reduce_inputs import Arrays, Fetched, Lists, Variables

import tw_core
import tw_reduce
from tw_reduce.reducers import CollectiveKeys

OPTIONS = {
    "rounds": 31,
    "towers": [2, 4, 8],
    "profiles": "profiles.PROFILES",
    "only": [],
}

v1 = tf.compat.v1
OURS = "auto"
FLAT = "AddN over one flat buffer"
EACH = "AddN of each tensor, nothing around"
TENSORPACK = "tensorpack round robin, x 1/K"
ONE_DEVICE = "ReductionToOneDevice"
COLLECTIVE = "sum_collective, each tensor"
NO_PASS = ", NO_MEM_OPT"
FUNCTION = ", tf.function"


@dataclass(frozen=True)
class Cell:
    """One table: a profile, a number of towers, and which contenders."""

    profile: str
    towers: int
    rounds: int
    only: tuple[str, ...] = ()

    def title(self) -> str:
        return f"all-reduce, {PROFILES[self.profile].name}, K = {self.towers}"


def our_reducers(devices: list[str]) -> dict[str, Callable[[Lists], Lists]]:
    """Every algorithm of tw-reduce that runs on CPUs."""
    keys = CollectiveKeys()
    balanced = partial(tw_reduce.sum_balanced, devices=devices)
    collective = partial(tw_reduce.sum_collective, devices=devices, keys=keys)
    half = len(devices) // 2
    groups = [list(range(half)), list(range(half, len(devices)))]
    return {
        OURS: tw_reduce.auto(devices),
        "mean(auto)": tw_reduce.mean(tw_reduce.auto(devices)),
        "sum_on_device": partial(tw_reduce.sum_on_device, device=devices[0]),
        "sum_round_robin": partial(tw_reduce.sum_round_robin, devices=devices),
        "sum_balanced": balanced,
        "packed(sum_balanced)": tw_reduce.packed(balanced),
        "hierarchical, two groups": tw_reduce.hierarchical(groups, devices=devices),
        COLLECTIVE: collective,
        "packed(sum_collective)": tw_reduce.packed(collective),
    }


def peers(devices: list[str]) -> dict[str, Callable[[Lists], Lists]]:
    """TensorFlow's and tensorpack's."""
    copies = tf.distribute.HierarchicalCopyAllReduce()
    return {
        ONE_DEVICE: partial(batch_reduce, tf.distribute.ReductionToOneDevice()),
        "HierarchicalCopyAllReduce": partial(batch_reduce, copies),
        **tensorpack_reducers(devices),
    }


def batch_reduce(ops: tf.distribute.CrossDeviceOps, grads: Lists) -> Lists:
    """TensorFlow's own reductions, on the values that its strategies give them."""
    values = importlib.import_module("tensorflow.python.distribute.values")
    pairs = [(values.PerReplica(column),) * 2 for column in zip(*grads, strict=True)]
    reduced = ops.batch_reduce(tf.distribute.ReduceOp.SUM, pairs)
    return [[mirrored.values[k] for mirrored in reduced] for k in range(len(grads))]


def tensorpack_reducers(devices: list[str]) -> dict[str, Callable[[Lists], Lists]]:
    """tensorpack's replicated modes that run on CPUs, with its default average."""
    try:
        utils = importlib.import_module("tensorpack.graph_builder.utils")
    except Exception as error:  # whatever an old package does on a new TensorFlow
        print(f"tensorpack's rows are skipped: it cannot be imported ({error!r}).")
        return {}
    found = {"tensorpack round robin, x 1/K": partial(_naive, utils, devices)}
    if len(devices) == 8:
        found["tensorpack packed hierarchical, x 1/K"] = partial(
            _hierarchical, utils, devices
        )
    return found


def _naive(utils: ModuleType, devices: list[str], grads: Lists) -> Lists:
    means = utils.allreduce_grads_naive(grads, devices=devices, average=True)
    return [means] * len(grads)


def _hierarchical(utils: ModuleType, devices: list[str], grads: Lists) -> Lists:
    packer = utils.GradientPacker(len(devices))
    can_pack = packer.compute_strategy(grads[0])
    packs = packer.pack_all(grads, devices) if can_pack else grads
    means = utils.allreduce_grads_hierarchical(packs, devices, average=True)
    return packer.unpack_all(means, devices) if can_pack else means


class SessionRace:
    """Contenders that share one graph's variables and one session."""

    def __init__(self, arrays: Arrays, config: Any, suffix: str):
        self._arrays, self._suffix = arrays, suffix
        self._graph = tf.Graph()
        self._session = v1.Session(graph=self._graph, config=config)
        self._config = "session" + (suffix or ", default")
        with self._graph.as_default():
            variables = Variables(arrays)
            variables.load(self._session)
            self._grads = variables.grads()

    def contenders(
        self, reducers: dict[str, Callable[[Lists], Lists]]
    ) -> list[Contender]:
        """Builds each and compares its results with NumPy's."""
        return [self._contender(name, reducer) for name, reducer in reducers.items()]

    def flat_bound(self) -> Contender:
        """One AddN over buffers that each hold a whole tower's gradients."""
        with self._graph.as_default():
            buffers = Variables(self._arrays, flat=True)
            buffers.load(self._session)
            with tf.device(racing.device_names(1)[0]):
                inputs = [row[0] for row in buffers.grads()]
                total = tf.raw_ops.AddN(inputs=inputs)
            run = self._session.make_callable([total])
        want = np.concatenate([array.ravel() for array in self._arrays.sums])
        np.testing.assert_array_equal(run()[0], want)
        return Contender(FLAT + self._suffix, run, is_bound=True, config=self._config)

    def each_bound(self) -> Contender:
        """An AddN a tensor, all on one device: what even no library would cost."""
        added = self._contender(EACH, _add_each)
        return replace(added, is_bound=True)

    def _contender(self, name: str, reducer: Callable[[Lists], Lists]) -> Contender:
        with self._graph.as_default(), tf.name_scope(f"race_{id(reducer)}"):
            fetched = Fetched(reducer(self._grads))
            run = self._session.make_callable(fetched.tensors)
        self._arrays.check(name, fetched.lists(run()), scale=_scale(name, self._arrays))
        return Contender(name + self._suffix, run, config=self._config)


def _add_each(grads: Lists) -> Lists:
    with tf.device(racing.device_names(1)[0]):
        sums = [
            tf.raw_ops.AddN(inputs=list(column)) for column in zip(*grads, strict=True)
        ]
    return [sums] * len(grads)


def function_contenders(cell: Cell, arrays: Arrays) -> list[Contender]:
    """auto and MirroredStrategy, each in a tf.function."""
    devices = racing.device_names(cell.towers)
    variables = Variables(arrays)
    makers = {
        OURS: lambda: tw_reduce.auto(devices)(variables.grads()),
        "MirroredStrategy": partial(_mirrored, devices, variables),
    }
    found = []
    for name, make in makers.items():
        if _asked(name, cell.only):
            run, results = traced(make)
            arrays.check(name, results(), scale=1.0)
            found.append(Contender(name + FUNCTION, run, config="tf.function"))
    return found


def traced(make: Callable[[], Lists]) -> tuple[Callable[[], Any], Callable[[], Lists]]:
    """Returns a ``tf.function`` of it, and what that gives as arrays."""
    noted: list[Fetched] = []

    @tf.function(autograph=False)
    def run() -> list[Any]:
        noted.append(Fetched(make()))
        return noted[-1].tensors

    return run, lambda: (lambda out: noted[-1].lists(out))(run())


def _mirrored(devices: list[str], variables: Variables) -> Lists:
    strategy = tf.distribute.MirroredStrategy(devices)

    def replica() -> Any:
        context = tf.distribute.get_replica_context()
        k = int(tf.get_static_value(context.replica_id_in_sync_group))
        return context.all_reduce(tf.distribute.ReduceOp.SUM, variables.grads()[k])

    local = map(strategy.experimental_local_results, strategy.run(replica))
    return [list(row) for row in zip(*local, strict=True)]


def numpy_bounds(arrays: Arrays) -> list[Contender]:
    """NumPy's add over flat buffers, and a copy of one of them."""
    flats = [arrays.flat(k) for k in range(len(arrays.dense))]
    out = np.empty_like(flats[0])

    def add() -> None:
        np.add(flats[0], flats[1], out=out)
        for flat in flats[2:]:
            np.add(out, flat, out=out)

    return [
        Contender("NumPy add, flat", add, is_bound=True, config="one thread"),
        Contender(
            "copy of one flat buffer",
            lambda: np.copyto(out, flats[0]),
            is_bound=True,
            config="one thread",
        ),
    ]


def run_cell(cell: Cell) -> list[Timing]:
    """Builds, checks and races all contenders of one table."""
    devices = racing.use_devices(cell.towers)
    arrays = Arrays(PROFILES[cell.profile], cell.towers)
    no_pass = tw_core.session_config()
    default = v1.ConfigProto(
        device_count={"CPU": cell.towers}, gpu_options=no_pass.gpu_options
    )
    plain = SessionRace(arrays, default, "")
    without = SessionRace(arrays, no_pass, NO_PASS)
    asked = {
        name: reducer
        for name, reducer in (our_reducers(devices) | peers(devices)).items()
        if _asked(name, cell.only)
    }
    contenders = plain.contenders(asked)
    contenders += without.contenders({OURS: tw_reduce.auto(devices)})
    contenders += function_contenders(cell, arrays)
    if not arrays.profile.sparse:
        contenders += [plain.each_bound(), without.each_bound()]
        contenders += [plain.flat_bound(), without.flat_bound()]
        contenders += numpy_bounds(arrays)
    return race(cell.title(), contenders, peer=OURS, rounds=cell.rounds)


def note_targets(report: Report, cell: Cell, timings: list[Timing]) -> None:
    """Compares with what was asked of this cell."""
    names = {timing.name for timing in timings}
    rivals = [
        timing
        for timing in timings
        if not timing.is_bound and timing.name not in (OURS, OURS + NO_PASS)
    ]
    if rivals:
        best = min(rivals, key=lambda timing: timing.median_s).name
        report.compare(timings, OURS, best, 1.05)
    for ours, theirs, at_most in targets(cell):
        if {ours, theirs} <= names:
            report.compare(timings, ours, theirs, at_most)


def targets(cell: Cell) -> list[tuple[str, str, float]]:
    """Ours, theirs, and the ratio that was asked for."""
    found = []
    if cell.profile == "resnet50":
        at_most = {8: 0.6}.get(cell.towers, 0.75)
        found.append((OURS, TENSORPACK, at_most))
        found.append(("mean(auto)", TENSORPACK, at_most))
    if cell.profile == "resnet50" and cell.towers == 8:
        found.append((OURS, COLLECTIVE, 0.12))
    if cell.profile == "small" and cell.towers == 4:
        found.append((OURS, ONE_DEVICE, 0.3))
    if cell.profile in ("resnet50", "huge") and cell.towers == 2:
        found.append((OURS, FLAT, 1.1))
    if cell.profile in ("resnet50", "huge") and cell.towers == 4:
        found.append((OURS, FLAT, 0.7))
        found.append((OURS + NO_PASS, FLAT + NO_PASS, 1.05))
    return found


def main(options: Any, report: Report) -> None:
    """Races all-reduces over whole gradient lists."""
    for profile in options.profiles:
        for towers in options.towers:
            cell = Cell(profile, towers, options.rounds, tuple(options.only))
            note_targets(report, cell, report.race(OURS, run_cell, cell))


def _asked(name: str, only: tuple[str, ...]) -> bool:
    return not only or name == OURS or any(part in name for part in only)


def _scale(name: str, arrays: Arrays) -> float:
    is_mean = "1/K" in name or name.startswith("mean(")
    return 1.0 / len(arrays.dense) if is_mean else 1.0
