"""Every public function answers a wrong call in a sentence that names it."""

from functools import partial

import pytest
import tensorflow as tf

import tw_reduce
from tw_core.testing import CPUS, WrongCall, check_wrong_call, names_without_wrong_calls
from tw_reduce import (
    accumulate_as,
    all_reduce,
    auto,
    broadcast,
    compress,
    doctor,
    hierarchical,
    mean,
    packed,
    partition,
    plans,
    reducer_for_mode,
    reducers,
    sum_balanced,
    sum_collective,
    sum_nccl,
    sum_on_device,
    sum_round_robin,
    tensorpack,
)
from tw_reduce.doctor import main
from tw_reduce.plans import (
    MeasuredProfile,
    Measurements,
    Strategy,
    TensorInfo,
    describe,
    plan_auto,
    plan_balanced,
    plan_hierarchy,
    plan_packs,
    plan_splits,
    read_measurements,
)
from tw_reduce.reducers import (
    CollectiveKeys,
    check_adds,
    check_reduced,
    check_tower_tensors,
)
from tw_reduce.tensorpack import (
    GradientPacker,
    aggregate_grads_colocate,
    allreduce_grads,
    allreduce_grads_hierarchical,
    allreduce_grads_naive,
)

TWO = list(CPUS[:2])
GPUS = ["/job:worker/task:0/gpu:0", "/job:worker/task:0/gpu:1"]
KEYS = CollectiveKeys()
EAGER = tf.constant([1.0])
NAN = float("nan")
# What planners and `auto` give out; their attributes are documented, not checked.
PLANS = [
    *("AutoPlan", "BalancePlan", "Choice", "HierarchyPlan", "PackPlan", "SplitPlan"),
    "MeasuredProfile",
    "PackPlan.packed_shapes",  # tw-core's
]


@pytest.fixture(autouse=True)
def graph():
    """A fresh graph, the default one during the test."""
    with tf.Graph().as_default() as graph:
        yield graph


def on_first(grads):
    return sum_on_device(grads, device="/cpu:0")


def balanced(grads):
    return sum_balanced(grads, devices=TWO)


def ones(dtype=tf.float32, num_towers=2):
    return [[tf.ones([2], dtype)] for _ in range(num_towers)]


def strings():
    return [[tf.constant(["a"])] for _ in range(2)]


def of_another_graph():
    with tf.Graph().as_default():
        return ones()


def eager():
    return [[EAGER], [EAGER]]


def contradictory():
    shapes = ([None], [3], [4])
    return [[tf.compat.v1.placeholder(tf.float32, shape)] for shape in shapes]


def scalar_beside_rows():
    rows = tf.IndexedSlices(tf.ones([1]), tf.constant([0]), tf.constant([3]))
    return [[tf.ones([])], [rows]]


def rows(name, call, *cases):
    """Makes a row of each (arguments, error, part of the message)."""
    return [
        WrongCall(name, partial(call, *args), error, says)
        for args, error, says in cases
    ]


def wrong_lists(wrong):
    """The cases of [K][N] gradients, made when called: ``wrong`` takes a maker."""
    cases = [
        (lambda: None, TypeError, "grads must be a list with one list of"),
        (lambda: "grads", TypeError, "per tower; got 'grads'"),
        (lambda: tf.ones([2, 2]), TypeError, "per tower; got"),
        (
            lambda: [tf.ones([2]), tf.ones([2])],
            TypeError,
            "something else for towers 0",
        ),
        (lambda: [None, [tf.ones([2])]], TypeError, "for towers 0 (NoneType)"),
        (lambda: ["ab", "cd"], TypeError, "for towers 0 (str), 1 (str)"),
        (list, ValueError, "grads is empty"),
        (lambda: [[tf.ones([2])], []], ValueError, "got [1, 0] from towers 0..1"),
        (
            lambda: [[tf.ones([2])], [None]],
            ValueError,
            "gradient None in towers [1]",
        ),
        (lambda: [[tf.ones([2])], [2.0]], TypeError, "grads[1][0] is float"),
        (lambda: [[tf.Variable(1.0)]], TypeError, "Variable. Convert it"),
        (of_another_graph, ValueError, "position 0 has gradients of another graph"),
        (eager, ValueError, "or eager ones in a graph, in towers [0, 1]"),
        (contradictory, ValueError, "'(None,)', '(3,)', '(4,)'"),
        (scalar_beside_rows, ValueError, "position 0 has gradients of shapes"),
        (lambda: [ones()[0], ones(tf.int32)[0]], ValueError, "['float32', 'int32']"),
    ]
    return [((partial(wrong, make),), error, says) for make, error, says in cases]


def called(make):
    return make()


def list_rows(name, call):
    """Rows of all wrong lists of gradients."""
    return rows(name, called, *wrong_lists(lambda make: call(make())))


def unaddable(name, call):
    return [
        *rows(
            name,
            lambda make: call(make()),
            ((lambda: ones(tf.bool),), TypeError, "got others at positions 0 (bool)"),
            ((strings,), TypeError, "positions 0 (string)"),
        )
    ]


def no_devices():
    """The cases of a list of devices."""
    return [
        ((None,), TypeError, "devices must be a list of device strings; got None"),
        (("/cpu:0",), TypeError, "got '/cpu:0'"),
        (([0, 1],), TypeError, "got [0, 1]"),
        (([],), ValueError, "devices is empty"),
    ]


def no_function(name):
    return [
        ((value,), TypeError, f"{name} must be a function; got {value!r}")
        for value in (None, "adam", 3)
    ]


def not_whole(name, least):
    return [
        *(
            ((value,), TypeError, f"{name} must be a whole number; got {value!r}")
            for value in (None, "2", 2.5, NAN, [1], True)
        ),
        ((least - 1,), ValueError, f"{name} must be at least {least}; got {least - 1}"),
    ]


def threshold():
    """The cases of ``below_bytes``, of which None is none."""
    return not_whole("below_bytes", 0)[1:]


def no_keys():
    says = "keys must be a CollectiveKeys; got"
    return [((value,), TypeError, says) for value in ("keys", 3, CollectiveKeys)]


def no_flag():
    return [
        ((value,), TypeError, f"average must be True or False; got {value!r}")
        for value in (None, "no", 1)
    ]


def no_infos():
    return [
        ((None,), TypeError, "infos must be a list of TensorInfo; got None"),
        (([None, 3],), TypeError, "got others at positions 0 (NoneType), 1 (int)"),
    ]


def no_dtype():
    return [
        ((None,), TypeError, "dtype must be a tf.DType; got None"),
        (("floaty",), TypeError, "got 'floaty'"),
        ((tf.int32,), ValueError, "dtype must be floating; got int32"),
        ((tf.string,), ValueError, "got string"),
    ]


def no_groups():
    return [
        ((None,), TypeError, "groups must be a list of groups of towers; got None"),
        (([0, 1],), TypeError, "group must be a list of towers' indices; got 0"),
        (([[0, "1"]],), TypeError, "index must be a whole number; got '1'"),
        (([[0.5]],), TypeError, "index must be a whole number; got 0.5"),
        (([],), ValueError, "groups must hold"),
    ]


def packer():
    ready = GradientPacker(1)
    assert ready.compute_strategy([tf.ones([2_000])])
    return ready


def infos():
    return describe([tf.ones([2])])


def pair(name="w"):
    return tf.ones([2]), tf.compat.v1.get_variable(name, [2])


SUMS = {
    "sum_on_device": on_first,
    "sum_round_robin": partial(sum_round_robin, devices=TWO),
    "sum_balanced": balanced,
    "hierarchical": hierarchical([[0], [1]]),
    "sum_collective": partial(sum_collective, devices=TWO, keys=KEYS),
    "auto": auto(TWO),
    "all_reduce": all_reduce(TWO),
    "allreduce_grads_naive": allreduce_grads_naive,
}
AROUND = {
    "mean": mean,
    "packed": packed,
    "broadcast": broadcast,
    "compress": partial(compress, dtype=tf.bfloat16),
    "accumulate_as": partial(accumulate_as, dtype=tf.float64),
    "partition": lambda reducer: partition(lambda _: "a", {"a": reducer}),
}
LISTS = [
    *(row for name, call in SUMS.items() for row in list_rows(name, call)),
    *(row for name, call in SUMS.items() for row in unaddable(name, call)),
    *(
        row
        for name, around in AROUND.items()
        for row in list_rows(name, around(on_first))
    ),
    *list_rows("sum_nccl", partial(sum_nccl, devices=GPUS, keys=KEYS)),
    *list_rows("allreduce_grads", partial(allreduce_grads, average=False)),
    *list_rows(
        "allreduce_grads_hierarchical",
        partial(allreduce_grads_hierarchical, devices=list(CPUS)),
    ),
    *list_rows(
        "check_tower_tensors",
        check_tower_tensors,
    ),
]
REDUCERS = [
    *rows(
        "sum_on_device",
        lambda device: sum_on_device(ones(), device=device),
        ((None,), TypeError, "device must be a string; got None"),
        ((["/cpu:0"],), TypeError, "device must be a string"),
        (("",), ValueError, "device must not be empty"),
    ),
    *rows(
        "sum_round_robin", lambda d: sum_round_robin(ones(), devices=d), *no_devices()
    ),
    *rows("sum_balanced", lambda d: sum_balanced(ones(), devices=d), *no_devices()),
    *rows("hierarchical", hierarchical, *no_groups()),
    *rows(
        "hierarchical",
        lambda devices: hierarchical([[0], [1]], devices=devices),
        *no_devices()[1:],
    ),
    *rows(
        "sum_collective",
        lambda devices: sum_collective(ones(), devices=devices, keys=KEYS),
        *no_devices(),
        ((TWO[:1],), ValueError, "one device per tower; got 1 for 2 towers"),
        ((TWO[:1] * 2,), ValueError, "a device of its own"),
    ),
    *rows(
        "sum_collective",
        lambda keys: sum_collective(ones(), devices=TWO, keys=keys),
        ((None,), TypeError, "keys must be a CollectiveKeys; got None"),
        *no_keys(),
    ),
    *rows(
        "sum_collective",
        lambda dtype: sum_collective(ones(dtype), devices=TWO, keys=KEYS),
        ((tf.complex64,), TypeError, "positions 0 (complex64)"),
        ((tf.int8,), TypeError, "positions 0 (int8)"),
    ),
    *rows(
        "sum_collective",
        lambda s: sum_collective(ones(), devices=TWO, keys=KEYS, timeout_s=s),
        (("1",), TypeError, "timeout_s must be a number; got '1'"),
        ((0,), ValueError, "timeout_s must be above 0; got 0"),
        ((NAN,), ValueError, "timeout_s must be finite; got nan"),
    ),
    *rows(
        "sum_nccl",
        lambda devices: sum_nccl(ones(), devices=devices, keys=KEYS),
        *no_devices(),
        ((TWO,), ValueError, "between GPUs only"),
    ),
    *rows(
        "sum_nccl",
        lambda keys: sum_nccl(ones(), devices=GPUS, keys=keys),
        ((None,), TypeError, "keys must be a CollectiveKeys; got None"),
        *no_keys(),
    ),
    *rows(
        "sum_nccl",
        lambda dtype: sum_nccl(ones(dtype), devices=GPUS, keys=KEYS),
        ((tf.complex64,), ValueError, "positions 0 (complex64)"),
        ((tf.bool,), ValueError, "positions 0 (bool)"),
    ),
    *rows(
        "check_adds",
        lambda mode: check_adds(mode=mode),
        ((None,), TypeError, "mode must be a function; got None"),
        ((mean(balanced),), ValueError, "mode averages already, and its means"),
    ),
    *rows("auto", auto, *no_devices()),
    *rows("auto", lambda n: auto(TWO, below_bytes=n), *threshold()),
    *rows("auto", lambda keys: auto(TWO, keys=keys), *no_keys()),
    *rows(
        "auto", lambda explain: auto(TWO, explain=explain), *no_function("explain")[1:]
    ),
    *rows("all_reduce", all_reduce, *no_devices()),
    *rows("all_reduce", lambda n: all_reduce(TWO, below_bytes=n), *threshold()),
    *rows("all_reduce", lambda keys: all_reduce(TWO, keys=keys), *no_keys()),
    *rows(
        "all_reduce",
        lambda explain: all_reduce(TWO, explain=explain),
        *no_function("explain")[1:],
    ),
    *rows(
        "reducer_for_mode",
        lambda mode: reducer_for_mode(mode, TWO),
        ((None,), ValueError, "unknown mode None; known are ['collective', 'cpu'"),
        ((["cpu"],), ValueError, "unknown mode ['cpu']"),
        (("hierarchical",), ValueError, "means eight towers; got 2"),
    ),
    *rows("reducer_for_mode", lambda d: reducer_for_mode("cpu", d), *no_devices()),
    *rows(
        "reducer_for_mode", lambda k: reducer_for_mode("cpu", TWO, keys=k), *no_keys()
    ),
]
COMBINATORS = [
    *(
        row
        for name, around in AROUND.items()
        for row in rows(name, around, *no_function("reducer"))
    ),
    *(
        row
        for name, around in AROUND.items()
        for row in rows(
            name,
            lambda result, around=around: around(lambda grads: result)(ones()),
            ((None,), ValueError, "got NoneType. A reducer is [K][N]"),
            (([[]],), ValueError, "got lists of lengths [0]"),
        )
    ),
    *rows("packed", lambda n: packed(on_first, below_bytes=n), *threshold()),
    *rows("compress", partial(compress, on_first), *no_dtype()),
    *rows("accumulate_as", partial(accumulate_as, on_first), *no_dtype()),
    *rows(
        "mean",
        lambda dtype: mean(on_first)(ones(dtype)),
        ((tf.int32,), TypeError, "got others at positions 0 (int32)"),
        ((tf.bool,), TypeError, "got others at positions 0 (bool)"),
    ),
    *rows(
        "partition",
        lambda route: partition(route, {"a": on_first}),
        *no_function("route"),
    ),
    *rows(
        "partition",
        partial(partition, lambda _: "a"),
        ((None,), TypeError, "must be a dict of reducers by name; got NoneType"),
        (([on_first],), TypeError, "by name; got list"),
        (({},), ValueError, "reducers is empty"),
        (({"a b": on_first, 3: on_first},), ValueError, "got ['a b', 3]"),
        (({"": on_first},), ValueError, "got ['']"),
    ),
    *rows(
        "partition",
        lambda name: partition(lambda _: name, {"a": on_first})(ones()),
        ((None,), ValueError, "named others for the gradients at 0 (None)"),
        ((["a"],), ValueError, "at 0 (['a'])"),
    ),
]
PLANNERS = [
    *rows("plan_packs", plan_packs, *no_infos()),
    *rows("plan_packs", lambda n: plan_packs((), below_bytes=n), *threshold()),
    *rows("plan_auto", lambda own: plan_auto(own, TWO), *no_infos()),
    *rows("plan_auto", lambda devices: plan_auto(infos(), devices), *no_devices()),
    *rows("plan_auto", lambda n: plan_auto((), TWO, below_bytes=n), *threshold()),
    *rows("plan_splits", partial(plan_splits, num_split=2), *no_infos()),
    *rows(
        "plan_splits",
        lambda n: plan_splits((), num_split=n),
        *not_whole("num_split", 1),
    ),
    *rows("plan_balanced", lambda devices: plan_balanced([1], devices), *no_devices()),
    *rows(
        "plan_balanced",
        lambda sizes: plan_balanced(sizes, TWO),
        ((None,), TypeError, "num_bytes must be a list of whole numbers; got None"),
        ((["1"],), TypeError, "num_bytes must be a whole number; got '1'"),
        (([-1],), ValueError, "num_bytes must be at least 0; got -1"),
    ),
    *rows("plan_hierarchy", lambda groups: plan_hierarchy(groups, 0), *no_groups()),
    *rows(
        "plan_hierarchy",
        lambda groups: plan_hierarchy(groups, 0),
        ((((0,), ()),), ValueError, "none be empty; got ((0,), ())"),
    ),
    *rows(
        "plan_hierarchy",
        partial(plan_hierarchy, ((0, 1),)),
        *not_whole("index", 0),
    ),
    *rows(
        "describe",
        describe,
        ((None,), TypeError, "something else for towers 0 (NoneType)"),
        (([None],), ValueError, "position 0 has gradient None in towers [0]"),
        (([2.0],), TypeError, "grads[0][0] is float"),
    ),
    *rows(
        "check_reduced",
        lambda reduced, grads: check_reduced(reduced(), grads()),
        ((lambda: None, ones), ValueError, "got NoneType. A reducer is"),
        ((lambda: [[]], ones), ValueError, "got lists of lengths [0]"),
        ((ones, lambda: None), TypeError, "must be a list with one list of tensors"),
    ),
]
OLDER = [
    *rows(
        "allreduce_grads",
        lambda mode: allreduce_grads(ones(), False, mode),
        ((None,), ValueError, "mode must be one of ['collective', 'nccl']; got None"),
        ((["nccl"],), ValueError, "got ['nccl']"),
    ),
    *rows("allreduce_grads", lambda own: allreduce_grads(ones(), own), *no_flag()),
    *rows(
        "allreduce_grads", lambda k: allreduce_grads(ones(), True, keys=k), *no_keys()
    ),
    *rows(
        "allreduce_grads_hierarchical",
        lambda devices: allreduce_grads_hierarchical(ones(), devices),
        *no_devices(),
        ((list(CPUS),), ValueError, "eight devices and towers are needed; got 8 and 2"),
    ),
    *rows(
        "allreduce_grads_hierarchical",
        lambda own: allreduce_grads_hierarchical(ones(num_towers=8), CPUS, own),
        *no_flag(),
    ),
    *rows(
        "allreduce_grads_naive",
        lambda devices: allreduce_grads_naive(ones(), devices),
        *no_devices()[1:],
    ),
    *rows(
        "allreduce_grads_naive",
        lambda own: allreduce_grads_naive(ones(), average=own),
        *no_flag(),
    ),
    *rows(
        "aggregate_grads_colocate",
        lambda own: aggregate_grads_colocate([[pair()]], own),
        *no_flag(),
    ),
    *rows(
        "aggregate_grads_colocate",
        lambda make: aggregate_grads_colocate(make()),
        ((lambda: None,), TypeError, "all_grads must be a list with one list of"),
        ((lambda: [[tf.ones([2])]],), TypeError, "something else at tower 0 item 0"),
        ((lambda: [[(tf.ones([2]),)], [3]],), TypeError, "item 0, tower 1 item 0"),
        ((lambda: [[], []],), ValueError, "no gradient at all, from 2 towers"),
        (
            (lambda: [[pair("v")], [pair()]],),
            ValueError,
            "is a variable of their own",
        ),
        (
            (lambda: [[(tf.constant([True, False]), pair()[1])]],),
            ValueError,
            "has gradients of dtypes ['bool']",
        ),
    ),
]
CLASSES = [
    *rows(
        "CollectiveKeys",
        CollectiveKeys,
        *not_whole("start", 1)[1:-1],
        ((0,), ValueError, "start must be between 1 and 2**30; got 0"),
        ((2**30 + 1,), ValueError, "got 1073741825"),
    ),
    *rows(
        "CollectiveKeys",
        lambda flag: CollectiveKeys(note_arrivals=flag),
        ((1,), TypeError, "note_arrivals must be True or False; got 1"),
    ),
    *rows(
        "CollectiveKeys.bounded",
        KEYS.bounded,
        ((None,), TypeError, "function must be a function; got None"),
    ),
    *rows(
        "CollectiveKeys.bounded",
        lambda seconds: KEYS.bounded(print, timeout_s=seconds),
        (("1",), TypeError, "timeout_s must be a number; got '1'"),
        ((0,), ValueError, "timeout_s must be above 0; got 0"),
    ),
    *rows("CollectiveKeys.group", KEYS.group, *no_devices()),
    *rows("GradientPacker", GradientPacker, *not_whole("num_split", 1)),
    *rows(
        "GradientPacker.compute_strategy",
        lambda make: GradientPacker(1).compute_strategy(make()),
        ((lambda: None,), TypeError, "something else for towers 0 (NoneType)"),
        ((lambda: [None],), ValueError, "position 0 has gradient None in towers [0]"),
        ((lambda: [2.0],), TypeError, "grads[0][0] is float"),
    ),
    *rows(
        "GradientPacker.compute_strategy",
        lambda: packer().compute_strategy([tf.ones([2_000])]),
        ((), RuntimeError, "called a second time"),
    ),
    *(
        row
        for method in ("pack", "unpack")
        for row in rows(
            f"GradientPacker.{method}",
            lambda make, method=method: getattr(packer(), method)(make()),
            ((lambda: None,), TypeError, "must be a list of dense tensors; got None"),
            ((lambda: [None],), TypeError, "others at positions 0 (NoneType)"),
            ((lambda: [[1.0]],), TypeError, "others at positions 0 (list)"),
            ((lambda: [tf.ones([3])],), ValueError, "0 is float32 (3,) instead of"),
            (
                (lambda: [tf.ones([2_000], tf.float64)],),
                ValueError,
                "0 is float64 (2000,) instead of float32 (2000,)",
            ),
            ((lambda: [tf.ones([2_000])] * 2,), ValueError, "there are 2 instead of 1"),
        )
    ),
    *(
        row
        for method in ("pack", "unpack", "pack_all", "unpack_all")
        for row in rows(
            f"GradientPacker.{method}",
            lambda method=method: getattr(GradientPacker(1), method)(
                *([[[]], ["/cpu:0"]] if "all" in method else [[]])
            ),
            ((), RuntimeError, "there is no plan to pack by"),
        )
    ),
    *(
        row
        for method in ("pack_all", "unpack_all")
        for row in [
            *rows(
                f"GradientPacker.{method}",
                lambda towers, method=method: getattr(packer(), method)(towers, TWO),
                ((None,), TypeError, "towers must be a list of lists of tensors"),
                (([[]],), ValueError, "got 2 devices for 1 towers"),
                (
                    ([None, None],),
                    TypeError,
                    "must be a list of dense tensors; got None",
                ),
            ),
            *rows(
                f"GradientPacker.{method}",
                lambda devices, method=method: getattr(packer(), method)([[]], devices),
                *no_devices(),
            ),
        ]
    ),
    *rows(
        "TensorInfo",
        lambda *args: TensorInfo(*args),
        (
            (None, (2,), "float32", 4),
            TypeError,
            "index must be a whole number; got None",
        ),
        ((0, "ab", "float32", 4), TypeError, "shape must be a tuple of sizes or None"),
        ((0, (2, -1), "float32", 4), ValueError, "shape must be at least 0; got -1"),
        ((0, (2,), tf.float32, 4), TypeError, "dtype must be a string"),
        ((0, (2,), "float32", -1), ValueError, "itemsize must be at least 0; got -1"),
        ((0, (2,), "float32", 4, "no"), TypeError, "is_sparse must be True or False"),
    ),
]
ON_DEVICE = Strategy("sum_on_device", "sum_on_device", 0)
TIMES = {"auto": {ON_DEVICE: 1.0}, "all_reduce": {ON_DEVICE: 1.0}}
ELSEWHERE = Measurements(("/device:CPU:0",), {}, (MeasuredProfile("p", (4,), TIMES),))
WITH_MEASURED = {
    "auto": lambda own: auto(TWO, measured=own),
    "all_reduce": lambda own: all_reduce(TWO, measured=own),
    "plan_auto": lambda own: plan_auto((), TWO, measured=own),
}


def no_measurements():
    """What every function with ``measured=`` refuses."""
    return [
        ((3,), TypeError, "measured must be a path, or what tw-doctor wrote there"),
        (({"format": 7},), ValueError, "must have format 1 of tw-doctor; got 7"),
        (({"format": 1},), ValueError, "holds no times of reducers"),
        ((__file__,), ValueError, "test_wrong_calls.py is not JSON"),
    ]


def other_devices():
    return [((ELSEWHERE,), ValueError, "was taken on devices ['/device:CPU:0']; got")]


MEASURED = [
    *rows("read_measurements", read_measurements, *no_measurements()),
    *(
        row
        for name, call in WITH_MEASURED.items()
        for row in rows(name, call, *no_measurements(), *other_devices())
    ),
    *rows(
        "plan_auto",
        lambda own: plan_auto((), TWO, copies=own),
        ((1,), TypeError, "copies must be True or False"),
    ),
    *rows(
        "Strategy",
        Strategy,
        (("sum", "sum_nccl", 0), ValueError, "unknown algorithm 'sum'; known are sum_"),
        ((None, "sum_nccl", 0), TypeError, "algorithm must be a string; got None"),
        (("sum_nccl", "sum_nccl", -1), ValueError, "below_bytes must be at least 0"),
        (
            ("sum_nccl", "sum_nccl", 0.5),
            TypeError,
            "below_bytes must be a whole number",
        ),
    ),
    *rows(
        "Measurements",
        lambda profiles: Measurements((), {}, profiles),
        (((),), ValueError, "no strategy has times on all profiles"),
    ),
    *rows(
        "main",
        main,
        (("--towers 2",), TypeError, "arguments must be a list of"),
        (([2],), TypeError, "argument must be a string; got 2"),
    ),
]
ROWS = [*MEASURED, *LISTS, *REDUCERS, *COMBINATORS, *PLANNERS, *OLDER, *CLASSES]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}: {row.says}")
def test_a_wrong_call_is_refused_in_a_sentence(row):
    check_wrong_call(row)


def test_no_public_name_goes_without_wrong_calls():
    modules = (tw_reduce, doctor, plans, reducers, tensorpack)
    lacking = {
        name
        for module in modules
        for name in names_without_wrong_calls(module, ROWS, exempt=())
    }
    # The weights' functions are tw-core's.
    assert lacking == {*PLANS, "check_weights", "shares_of", "unit_of"}
