"""Every public function answers a wrong call in a sentence that names it."""

from functools import partial

import pytest
import tensorflow as tf
from harness.wrong_calls import Interface, Late, WrongCall, WrongCalls, in_graph

from tw_core.testing import CPUS, run_in_function
from tw_reduce import (
    ReducerState,
    accumulate_as,
    all_reduce,
    auto,
    broadcast,
    compress,
    hierarchical,
    mean,
    packed,
    partition,
    sum_balanced,
    sum_collective,
    sum_nccl,
    sum_on_device,
    sum_round_robin,
)
from tw_reduce.compression import error_feedback, power_sgd, sign, to_row, top_k
from tw_reduce.plans import MeasuredProfile, Measurements, Strategy, describe
from tw_reduce.reducers import CollectiveKeys, check_adds, check_tower_tensors
from tw_reduce.tensorpack import (
    GradientPacker,
    allreduce_grads,
    allreduce_grads_hierarchical,
    allreduce_grads_naive,
)

TWO = list(CPUS[:2])
GPUS = ["/job:worker/task:0/gpu:0", "/job:worker/task:0/gpu:1"]
KEYS = CollectiveKeys()
ON_DEVICE = Strategy("sum_on_device", "sum_on_device", 0)
TIMES = {"auto": {ON_DEVICE: 1.0}, "all_reduce": {ON_DEVICE: 1.0}}
MEASURED = Measurements(("/device:CPU:0",), {}, (MeasuredProfile("p", (4,), TIMES),))
EAGER = tf.constant([1.0])


def on_first(grads):
    return sum_on_device(grads, device="/cpu:0")


def balanced(grads):
    return sum_balanced(grads, devices=TWO)


def ones(dtype=tf.float32, num_towers=2):
    return [[tf.ones([2], dtype)] for _ in range(num_towers)]


def of_another_graph():
    with tf.Graph().as_default():
        return ones()


def contradictory():
    shapes = ([None], [3], [4])
    return [[tf.compat.v1.placeholder(tf.float32, shape)] for shape in shapes]


def scalar_beside_rows():
    rows = tf.IndexedSlices(tf.ones([1]), tf.constant([0]), tf.constant([3]))
    return [[tf.ones([])], [rows]]


def on_two_devices():
    towers = [[tf.ones([2])], [tf.ones([2])]]
    for tower in towers:
        with tf.device(CPUS[3]):
            tower.append(tf.ones([2]))
    allreduce_grads(towers, average=False, mode="collective")


def packer():
    ready = GradientPacker(1)
    assert ready.compute_strategy([tf.ones([2_000])])
    return ready


def variables():
    return [[tf.Variable(tf.zeros([2]))] for _ in range(2)]


def state():
    return ReducerState(power_sgd(), variables())


class MisShapen:
    """Returns states, or sums, in other lists and nests than it should."""

    def __init__(self, sums=(), states=()):
        self.sums, self.states = sums, states

    def init(self, variables):
        return [{"own": tf.zeros([])} for _ in variables]

    def update(self, grads, states, add):
        return self.sums or add(grads), self.states or states


def step_of_init(first):
    reducer = MisShapen()
    reducer.init = lambda variables: first
    return step_of(reducer)


def step_of(reducer):
    return lambda: ReducerState(reducer, variables())(ones())


def step_of_compressor(compressor):
    reducer = error_feedback(compressor, min_elements=0)
    towers = [[tf.Variable(tf.zeros([2, 2]))]] * 2
    return lambda: ReducerState(reducer, towers)([[tf.ones([2, 2])]] * 2)


def pair(name="w"):
    return tf.ones([2]), tf.compat.v1.get_variable(name, [2])


GIVEN = {
    "grads": ones,
    "all_grads": ones,
    "allreduce_grads_hierarchical.all_grads": lambda: ones(num_towers=8),
    "allreduce_grads_hierarchical.devices": lambda: list(CPUS),
    "aggregate_grads_colocate.all_grads": lambda: [[pair()]],
    "devices": lambda: TWO,
    "sum_nccl.devices": lambda: GPUS,
    "keys": lambda: KEYS,
    "device": lambda: "/cpu:0",
    "dtype": lambda: tf.bfloat16,
    "reducer": lambda: on_first,
    "groups": lambda: ((0,), (1,)),
    "route": lambda: lambda info: "a",
    "reducers": lambda: {"a": on_first},
    "infos": lambda: describe([tf.ones([2])]),
    "num_split": lambda: 1,
    "num_bytes": lambda: [1],
    "index": lambda: 0,
    "mode": lambda: "cpu",
    "allreduce_grads.mode": lambda: "collective",
    "average": lambda: True,
    "function": lambda: print,
    "small": lambda: "sum_on_device",
    "large": lambda: "sum_on_device",
    "Strategy.below_bytes": lambda: 0,
    "TensorInfo.shape": lambda: (2,),
    "TensorInfo.dtype": lambda: "float32",
    "itemsize": lambda: 4,
    "GradientPacker": packer,
    "GradientPacker.compute_strategy": lambda: GradientPacker(1),
    "measured": lambda: MEASURED,
    "GradientPacker.compute_strategy.grads": lambda: [tf.ones([2_000])],
    "GradientPacker.pack.grads": lambda: [tf.ones([2_000])],
    "grad_packs": lambda: [tf.ones([2_000])],
    "all_packed": lambda: [[tf.ones([2_000])]] * 2,
    "start": lambda: 1,
    "made_on": dict,
    "tensors": lambda: [tf.ones([2])],
    "variables": variables,
    "ReducerState": state,
    "ReducerState.reducer": power_sgd,
    "after.reducer": power_sgd,
    "steps": lambda: 2,
    "ReducerState.commit.reduced": lambda: state().update(ones()),
    **{f"ReducerState.{name}_own_variables.store": dict for name in ("save", "load")},
    "ReducerState.load_own_variables.total": lambda: 3,
    "ReducerState.load_own_variables.first": lambda: 0,
    "check_reduced.reduced": ones,
    "compressor": sign,
    "rows": lambda: to_row([tf.ones([2])]),
    "specs": lambda: [tf.TensorSpec([2])],
}
NAMED = {
    ".all_grads": "grads",
    "GradientPacker.pack_all.all_grads": "towers",
    ".all_packed": "towers",
    "GradientPacker.pack.grads": "tensors",
    ".grad_packs": "tensors",
    "aggregate_grads_colocate.all_grads": "all_grads",
    ".small": "algorithm",
    ".large": "algorithm",
    ".groups": "groups?",
    ".tensors": "tensors?|grads",
    ".reduced": "The reducer must return",
    "ReducerState.commit.reduced": "reduced",
    "main.arguments": "arguments?",
}
EXEMPT = {
    "takes what tf.as_dtype does, as True for float32": (
        "accumulate_as.dtype compress.dtype"
    ),
    "checks only that its profiles can be compared": "Measurements",
    "of any list it shows the lengths": (
        "check_reduced GradientPacker.pack_all.all_grads "
        "GradientPacker.unpack_all.all_packed"
    ),
}
INTERFACE = Interface("tw-reduce", GIVEN, named=NAMED, exempt=EXEMPT)
DTYPES = [
    (None, TypeError, "dtype must be a tf.DType; got None"),
    ("floaty", TypeError, "got 'floaty'"),
    (tf.int32, ValueError, "dtype must be floating; got int32"),
    (tf.string, ValueError, "got string"),
]
NO_GRADIENTS = [
    ([None], ValueError, "position 0 has gradient None in towers [0]"),
    ([2.0], TypeError, "grads[0][0] is float"),
]
NO_PACKS = [
    ([None], TypeError, "others at positions 0 (NoneType)"),
    ([[1.0]], TypeError, "others at positions 0 (list)"),
    (Late(lambda: [tf.ones([3])]), ValueError, "0 is float32 (3,) instead of"),
    (
        Late(lambda: [tf.ones([2_000], tf.float64)]),
        *(ValueError, "0 is float64 (2000,) instead of float32 (2000,)"),
    ),
    (Late(lambda: [tf.ones([2_000])] * 2), ValueError, "there are 2 instead of 1"),
]
NO_TOWERS = [
    (None, TypeError, "towers must be a list of lists of tensors"),
    ([[]], ValueError, "got 2 devices for 1 towers"),
    ([None, None], TypeError, "must be a list of dense tensors; got None"),
]
OTHERS = {
    "sum_on_device.device": [("", ValueError, "device must not be empty")],
    ".devices": [([], ValueError, "devices is empty")],
    "sum_collective.devices": [
        (TWO[:1], ValueError, "one device per tower; got 1 for 2 towers"),
        (
            ["/cpu:1", "/device:CPU:1"],
            *(ValueError, "a device of its own; several are on ['/device:CPU:1']"),
        ),
    ],
    "hierarchical": [
        (
            {"groups": [[0, 1], [1, 2], [7]], "devices": CPUS[:4]},
            *(ValueError, "missing [3], twice [1], unknown [7]"),
        ),
        ({"groups": [[0, 1], [1]]}, ValueError, "Write e.g. [[0, 1], [2, 3]]"),
        ({"groups": [[0], []]}, ValueError, "empty groups [1]"),
    ],
    "sum_collective.grads": [
        (Late(lambda: ones(tf.complex64)), TypeError, "positions 0 (complex64)"),
        (Late(lambda: ones(tf.int8)), TypeError, "positions 0 (int8)"),
    ],
    "sum_collective.timeout_s": [(0, ValueError, "timeout_s must be above 0; got 0")],
    "sum_nccl.devices": [
        (TWO, ValueError, "between GPUs only; got ['/cpu:0', '/cpu:1']. On other dev"),
        (["/gpu:0", "/gpu:1"], ValueError, "this process has no GPU"),
        (GPUS[:1], ValueError, "one device per tower; got 1 for 2 towers"),
        (GPUS[:1] * 2, ValueError, "a device of its own"),
    ],
    "sum_nccl.grads": [
        (Late(lambda: ones(tf.complex64)), ValueError, "positions 0 (complex64)"),
        (Late(lambda: ones(tf.bool)), ValueError, "positions 0 (bool)"),
    ],
    "check_adds": [
        ({"mode": None}, TypeError, "mode must be a function; got None"),
        ({"mode": mean(balanced)}, ValueError, "mode averages already, and its means"),
    ],
    "allreduce_grads.mode": [
        ("cpu", ValueError, "mode must be one of ['collective', 'nccl']; got 'cpu'"),
    ],
    "reducer_for_mode.mode": [
        (
            "ring",
            ValueError,
            "known are ['collective', 'cpu', 'gpu', 'hierarchical', 'nccl']",
        ),
        ("nccl", ValueError, "NCCL adds between GPUs only"),
        ("hierarchical", ValueError, "needs eight towers; got 2"),
    ],
    ".below_bytes": [(-1, ValueError, "below_bytes must be at least 0; got -1")],
    "accumulate_as.dtype": DTYPES,
    "compress.dtype": DTYPES,
    "partition.reducers": [
        ({}, ValueError, "reducers is empty"),
        ({"a b": on_first, 3: on_first}, ValueError, "got ['a b', 3]"),
        ({"a": None}, TypeError, "must be a function; got None"),
        ({"a": power_sgd(), "b": on_first}, TypeError, "or none, as those without"),
        ({"a": power_sgd(), "b": sign()}, TypeError, "sign() compresses one tensor"),
    ],
    ".infos": [([None, 3], TypeError, "got others at positions 0 (NoneType), 1 (int)")],
    "plan_splits.num_split": [(0, ValueError, "num_split must be at least 1; got 0")],
    "plan_balanced.num_bytes": [
        (["1"], TypeError, "num_bytes must be a whole number; got '1'"),
        ([-1], ValueError, "num_bytes must be at least 0; got -1"),
    ],
    ".groups": [
        ([[0, "1"]], TypeError, "index must be a whole number; got '1'"),
        ([], ValueError, "groups must hold"),
    ],
    "plan_hierarchy": [
        ({"groups": ((0,), ())}, ValueError, "may be empty; got ((0,), ())"),
        ({"index": -1}, ValueError, "index must be at least 0; got -1"),
    ],
    "describe.tensors": NO_GRADIENTS,
    "GradientPacker.compute_strategy.grads": NO_GRADIENTS,
    "check_reduced": [
        ({"reduced": None}, ValueError, "got NoneType. A reducer is"),
        ({"reduced": [[]]}, ValueError, "got lists of lengths [0]"),
        ({"grads": None}, TypeError, "must be a list with one list of tensors"),
    ],
    "mean.weights": [([], ValueError, "weights must be a non-empty")],
    "allreduce_grads_hierarchical": [
        ({"all_grads": Late(ones)}, ValueError, "and towers are needed; got 8 and 2"),
    ],
    "aggregate_grads_colocate.all_grads": [
        (Late(lambda: [[tf.ones([2])]]), TypeError, "something else at tower 0 item 0"),
        (Late(lambda: [[(tf.ones([2]),)], [3]]), TypeError, "item 0, tower 1 item 0"),
        ([[], []], ValueError, "No gradient at all, from 2 towers"),
        (
            Late(lambda: [[pair("v")], [pair()]]),
            *(ValueError, "is a separate variable"),
        ),
        (
            Late(lambda: [[(tf.constant([True, False]), pair()[1])]]),
            *(ValueError, "has gradients of dtypes ['bool']"),
        ),
    ],
    "ReducerState.reducer": [
        (on_first, TypeError, "reducer must have init(variables) and update(grads, st"),
        (MisShapen, TypeError, "got <class"),
    ],
    "ReducerState.variables": [
        ([], ValueError, "all of one length; got lists of lengths []"),
        (Late(lambda: [*variables(), []]), ValueError, "lists of lengths [1, 1, 0]"),
    ],
    **{
        f"ReducerState.{name}.grads": [
            (Late(lambda: ones()[:1]), ValueError, "lengths [1, 1]; got [1]"),
            (Late(lambda: [[tf.ones([3])]] * 2), ValueError, "0 ((3,), its variable ("),
            (Late(lambda: [[None], *ones()[:1]]), ValueError, "None in towers [0]"),
        ]
        for name in ("update", "__call__")
    },
    "ReducerState.of.variables": [
        (Late(lambda: variables()[0]), ValueError, "must be among tower 0's; got also"),
    ],
    "after.steps": [(-1, ValueError, "steps must be at least 0; got -1")],
    "after.reducer": [
        (on_first, TypeError, "reducer must have init(variables) and update(grads, s"),
    ],
    "error_feedback.min_elements": [
        (-1, ValueError, "min_elements must be at least 0; got -1"),
    ],
    "power_sgd": [
        ({"rank": 0}, ValueError, "rank must be at least 1; got 0"),
        ({"min_rate": 0.5}, ValueError, "min_rate must be at least 1"),
    ],
    "top_k": [
        ({"share": 0}, ValueError, "share must be above 0"),
        ({"share": 1.5}, ValueError, "share must be at most 1; got 1.5"),
        ({"count": 0}, ValueError, "count must be at least 1; got 0"),
    ],
    "to_row.tensors": [
        (
            Late(lambda: [tf.ones([2], tf.float64), tf.ones([2])]),
            *(ValueError, "others at positions 0 (float64 (2,)). Cast the tensors"),
        ),
        (Late(lambda: [tf.constant([True])]), ValueError, "0 (bool (1,)). Cast the"),
    ],
    "from_rows.specs": [
        ([tf.TensorSpec([2], tf.bool)], ValueError, "at positions 0 (bool (2,))"),
        ([tf.TensorSpec([3])], ValueError, "they take 3 words of four bytes, and rows"),
    ],
    "CollectiveKeys.start": [
        (0, ValueError, "start must be between 1 and 2**30; got 0"),
        (2**30 + 1, ValueError, "got 1073741825"),
    ],
    "CollectiveKeys.bounded.timeout_s": [
        (0, ValueError, "timeout_s must be above 0; got 0"),
    ],
    "GradientPacker.num_split": [
        (0, ValueError, "num_split must be at least 1; got 0"),
    ],
    "GradientPacker.pack.grads": NO_PACKS,
    "GradientPacker.unpack.grad_packs": NO_PACKS,
    "GradientPacker.pack_all.all_grads": NO_TOWERS,
    "GradientPacker.unpack_all.all_packed": NO_TOWERS,
    "TensorInfo": [
        ({"shape": (2, -1)}, ValueError, "shape must be at least 0; got -1"),
        ({"itemsize": -1}, ValueError, "itemsize must be at least 0; got -1"),
    ],
    ".measured": [
        ({"format": 7}, ValueError, "must have format 1 of tw-doctor; got 7"),
        ({"format": 1}, ValueError, "has no times of reducers"),
        (__file__, ValueError, "test_wrong_calls.py is not JSON"),
    ],
    **{
        f"{name}.measured": [
            (MEASURED, ValueError, "was taken on devices ['/device:CPU:0']; got")
        ]
        for name in ("auto", "all_reduce", "plan_auto")
    },
    "Strategy": [
        ({"small": "sum"}, ValueError, "unknown algorithm 'sum'; known are sum_"),
        ({"below_bytes": -1}, ValueError, "below_bytes must be at least 0"),
    ],
    "Measurements": [
        ({"profiles": ()}, ValueError, "no strategy has times on all profiles"),
    ],
}
# What takes [K][N] gradients, and what reducers are made of.
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
TAKE_LISTS = {
    **SUMS,
    **{name: around(on_first) for name, around in AROUND.items()},
    "sum_nccl": partial(sum_nccl, devices=GPUS, keys=KEYS),
    "allreduce_grads": partial(allreduce_grads, average=False),
    "allreduce_grads_hierarchical": partial(
        allreduce_grads_hierarchical, devices=list(CPUS)
    ),
    "check_tower_tensors": check_tower_tensors,
}
CHECKED = [
    (lambda: None, TypeError, "grads must be a list with one list of"),
    (lambda: [[tf.ones([2])], [None]], ValueError, "gradient None in towers [1]"),
    (of_another_graph, ValueError, "position 0 has gradients of another graph"),
    (contradictory, ValueError, "'(None,)', '(3,)', '(4,)'"),
]
WRONG_LISTS = [
    (lambda: "grads", TypeError, "per tower; got 'grads'"),
    (lambda: tf.ones([2, 2]), TypeError, "per tower; got"),
    (lambda: [tf.ones([2])] * 2, TypeError, "something else for towers 0"),
    (lambda: [None, [tf.ones([2])]], TypeError, "for towers 0 (NoneType)"),
    (lambda: ["ab", "cd"], TypeError, "for towers 0 (str), 1 (str)"),
    (list, ValueError, "grads is empty"),
    (lambda: [[tf.ones([2])], []], ValueError, "got [1, 0] from towers 0..1"),
    (
        lambda: [[tf.ones(2), 1.0], ["g", tf.ones(2)]],
        *(TypeError, "grads[0][1] is float, grads[1][0] is str"),
    ),
    (lambda: [[tf.Variable(1.0)]], TypeError, "Variable. Convert it"),
    (lambda: [[EAGER]] * 2, ValueError, "or eager ones in a graph, in towers [0, 1]"),
    (scalar_beside_rows, ValueError, "position 0 has gradients of shapes"),
    (lambda: [*ones()[:1], *ones(tf.int32)[:1]], ValueError, "['float32', 'int32']"),
]
UNADDABLE = [
    (lambda: ones(tf.bool), TypeError, "got others at positions 0 (bool)"),
    (lambda: [[tf.constant(["a"])]] * 2, TypeError, "positions 0 (string)"),
]


def with_lists(calls, cases):
    return [
        WrongCall(name, lambda call=call, make=make: call(make()), error, says)
        for name, call in calls.items()
        for make, error, says in cases
    ]


def of_returned(name, make_reducer, *cases):
    """Rows of a reducer that was made of ``cases``' values, when it is called."""
    return [
        WrongCall(name, lambda value=value: make_reducer(value)(ones()), error, says)
        for value, error, says in cases
    ]


def packs(method):
    """Packs by a plan that was not made."""
    both = ([[]], ["/cpu:0"]) if "all" in method else ([],)
    return WrongCall(
        f"GradientPacker.{method}",
        lambda: getattr(GradientPacker(1), method)(*both),
        *(RuntimeError, "There is no plan for packing"),
    )


ROWS = [
    *INTERFACE.rows(OTHERS),
    *with_lists(TAKE_LISTS, CHECKED),
    *with_lists({"check_tower_tensors": check_tower_tensors}, WRONG_LISTS),
    *with_lists(SUMS, UNADDABLE),
    *(
        row
        for name, around in AROUND.items()
        for row in of_returned(
            name,
            lambda result, around=around: around(lambda grads: result),
            (None, ValueError, "got NoneType. A reducer is [K][N]"),
            ([[]], ValueError, "got lists of lengths [0]"),
        )
    ),
    *of_returned(
        "partition",
        lambda name: partition(lambda _: name, {"a": on_first}),
        (None, ValueError, "named others at 0 (None)"),
        (["a"], ValueError, "at 0 (['a'])"),
    ),
    *with_lists(
        {"mean": mean(on_first)},
        [
            (lambda: ones(tf.int32), TypeError, "got others at positions 0 (int32)"),
            (lambda: ones(tf.bool), TypeError, "got others at positions 0 (bool)"),
        ],
    ),
    *(
        WrongCall("mean", lambda w=weights: mean(on_first, weights=w)(ones()), *case)
        for weights, *case in [
            ([1, -2], ValueError, "finite and 0 or more; got tower 1: -2"),
            ([float("nan"), 1], ValueError, "got tower 0: nan"),
            ([1, "2"], TypeError, "one per tower; got tower 1: '2'"),
            ([1, 2, 3], ValueError, "weights must be one per tower (2); got 3"),
        ]
    ),
    *(
        WrongCall(name, lambda c=call: c(ones(num_towers=3)), ValueError, says)
        for name, call, says in [
            (
                "hierarchical",
                hierarchical([[0, 1]]),
                "3 towers (by the gradient lists)",
            ),
            ("auto", auto(TWO), "devices must hold one device per tower; got 2 for 3"),
        ]
    ),
    *(
        WrongCall("ReducerState.__call__", step_of(reducer), ValueError, says)
        for reducer, says in [
            (MisShapen(sums=[[]]), "of lengths [1, 1]; got lists of lengths [0]"),
            (MisShapen(states=[[], []]), "got lists of lengths [0, 0]"),
            (
                MisShapen(states=[[()], [()]]),
                "nested as those of init; those of tower 0",
            ),
        ]
    ),
    *(
        WrongCall(name, lambda c=call, own=own: c(own), TypeError, says)
        for name, call in [
            ("check_adds", lambda own: check_adds(mode=own)),
            ("ReducerState", lambda own: ReducerState(own, variables())),
            (
                "ReducerState",
                lambda own: ReducerState(power_sgd(), variables(), add=own),
            ),
            *AROUND.items(),
        ]
        for own, says in [
            (sign(), "of all towers; sign() compresses one tensor. Make a reducer"),
            (top_k, "of it: tw_reduce.compression.error_feedback(top_k())"),
        ]
    ),
    *(
        WrongCall("ReducerState", step_of_init(first), *case)
        for first, *case in [
            ([(), ()], ValueError, "one state per variable, () for none: 1; got 2."),
            ({"own": 1}, TypeError, "init must return a list with one state per"),
            (None, TypeError, "() for none; got None."),
        ]
    ),
    WrongCall(
        *("error_feedback", lambda: error_feedback(top_k), TypeError),
        "compressor must compress a tensor; this function makes one: write top_k()",
    ),
    *(
        WrongCall("error_feedback", lambda c=compressor: step_of_compressor(c)(), *case)
        for compressor, *case in [
            *(
                (lambda own, d=decode: ([own], d), ValueError, f"float32; got {got}")
                for decode, got in [
                    (lambda own: own[0], "<tf.Tensor "),
                    (lambda own: tf.cast(own, tf.float16), "<tf.Tensor "),
                    (lambda own: None, "None"),
                    (lambda own: tf.IndexedSlices(own, tf.constant([0, 1])), "<tensor"),
                ]
            ),
            (lambda own: own, TypeError, "compressor must return two things, a list"),
            (lambda own: [own], TypeError, "compressor must return two things, a list"),
            (lambda own: (own, print), TypeError, "as in `return [sent], read`; got"),
            (lambda own: ([own], own), TypeError, "and a function that reads them"),
            (
                lambda own: ([own, own > 0, None, 1.0], print),
                *(TypeError, "at positions 1 (bool), 2 (NoneType), 3 (float)"),
            ),
        ]
    ),
    WrongCall(
        "allreduce_grads",
        on_two_devices,
        *(ValueError, "all gradients of a tower must be on its device; got "),
    ),
    *map(packs, ("pack", "unpack", "pack_all", "unpack_all")),
    WrongCall(
        "GradientPacker.compute_strategy",
        lambda: packer().compute_strategy([tf.ones([2_000])]),
        *(RuntimeError, "called a second time"),
    ),
]


class TestWrongCalls(WrongCalls):
    interface, rows, rows_in = INTERFACE, ROWS, in_graph


def test_unknown_devices_are_refused_where_they_are_known():
    add = partial(sum_on_device, device="/cpu:77")
    wanted = r"Unknown devices \['/cpu:77'\]"
    with pytest.raises(ValueError, match=wanted):
        run_in_function(add, [[1.0], [2.0]])
    config = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
    with (
        tf.Graph().as_default(),
        tf.compat.v1.Session(config=config),
        pytest.raises(ValueError, match=wanted),
    ):
        add(ones())


def test_nccl_is_refused_where_towers_share_a_gpu(monkeypatch, graph):
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    parts = [tf.config.LogicalDeviceConfiguration(memory_limit=64)] * 2
    devices = {"CPU": tf.config.get_visible_devices("CPU"), "GPU": [gpu]}
    monkeypatch.setattr(tf.config, "get_visible_devices", devices.get)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", {gpu: parts}.get)
    with pytest.raises(ValueError, match="a GPU for each tower; got 2 towers on 1"):
        sum_nccl([[tf.ones(2)]] * 2, devices=["/gpu:0", "/gpu:1"], keys=KEYS)
