"""Every public function answers a wrong call in a sentence."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import tensorflow as tf
from harness.wrong_calls import Interface, Late, WrongCall, WrongCalls, in_graph

from tw_core import (
    Replicated,
    Shared,
    TrainTowerContext,
    _black_box,
    _flat_packs,
    flat_variables,
    map_towers,
    synchronized,
    towers,
)
from tw_core.contexts import (
    PredictTowerContext,
    TowerFunc,
    TowerHandle,
    freeze_collections,
)
from tw_core.internal import Gradients
from tw_core.testing import CPUS

v1 = tf.compat.v1
OURS = towers(list(CPUS[:2]))
SPEC = [tf.TensorSpec([], name="x")]


def handle():
    with TrainTowerContext("tower0") as context:
        tf.constant(0, name="made")
    return TowerHandle(context, [], None)


def pairs():
    return [(tf.zeros([2]), v1.get_variable("w", [2]))]


GIVEN = {
    "index": lambda: 0,
    "Tower.device": lambda: "/cpu:0",
    "device": lambda: "/cpu:0",
    "total": lambda: 1,
    "devices": lambda: ["/cpu:0"],
    "fn": lambda: print,
    "towers": lambda: OURS,
    "tower": lambda: OURS[1],
    "count": lambda: 8,
    "graph": tf.Graph,
    "worker_device": lambda: "/cpu:0",
    "ps_devices": lambda: ["/cpu:0"],
    "op": tf.no_op,
    "next_creator": lambda: print,
    "ps_tasks": lambda: 1,
    "ns_name": lambda: "t",
    "tower_name": lambda: "t",
    "is_training": lambda: True,
    "key": lambda: "losses",
    "tower_fn": lambda: print,
    "input_signature": lambda: SPEC,
    "TowerHandle": handle,
    "context": lambda: PredictTowerContext("t"),
    "inputs": list,
    "outputs": lambda: None,
    "name": lambda: "made",
    "names": lambda: ["made"],
    "handles": list,
    "policy": Shared,
    "Replicated": Replicated,
    "factory": lambda: lambda tower: tf.Variable(1.0),
    "variable_lists": lambda: [[]],
    "variable": lambda: tf.Variable(1.0),
    "variables": list,
    "grad_list": lambda: [pairs()],
    "grads": lambda: [[tf.ones([2])]],
    "all_grads": lambda: [[1]],
    "all_vars": lambda: [[1]],
    "slices": lambda: tf.IndexedSlices(tf.ones([1]), tf.constant([0])),
    "function": lambda: print,
    "grad": lambda: tf.ones([2]),
    "factor": lambda: 0.5,
    "weight": lambda: 1.0,
    "weights": lambda: [1.0, 1.0],
    "tensors": lambda: [tf.zeros([3])],
    "flat": lambda: tf.zeros([3]),
    "shapes": lambda: [(3,)],
    "make_model": lambda: dict,
    "optimizer": lambda: v1.train.AdamOptimizer(),
    "get_opt_fn": lambda: dict,
    "model": lambda: None,
    "pairs": list,
    "training": lambda: True,
    "x": lambda: tf.ones([2]),
    "axes": lambda: 0,
    "batch_normalization.inputs": lambda: tf.ones([2, 3]),
    "paths": lambda: ["nowhere.json"],
    "path": lambda: "all.json",
    "task": lambda: "me",
    "recorder": lambda: _black_box.Recorder("me"),
    "wait": lambda: LATE,
    "CallThread.name": lambda: "calls",
    "call": lambda: print,
    "check": lambda: print,
    "after_s": lambda: 1.0,
}
LATE = _black_box.Wait("me", "it", 1.0, 1.0)
NAMED = {
    ".devices": "devices|device string",
    ".ps_devices": "device string|device",
    ".ps_device": "device string",
    ".worker_device": "device string",
    ".tower_name": "ns_name",
    "TowerHandle.get_collection.name": "key",
    ".names": "names?",
    ".handles": "TowerHandles?",
    ".variable_lists": "variable_lists|variables_of_a_tower",
    ".variables": "variables?",
}
EXEMPT = {
    "test_checks.py and test_testing.py test what checks others": (
        "check_flag check_kind check_list check_nested check_number check_text "
        "check_whole_number refusing_unknown"
    ),
    "abstract, or Python calls it": (
        "BaseTowerContext BaseTowerContext.get_collection_in_tower "
        "BaseTowerContext.__exit__ PredictTowerContext.__exit__ "
        "TrainTowerContext.__exit__"
    ),
    "takes anything; only the caller knows what would be wrong": (
        "is_elementwise is_variable is_same_in_towers repeated_variables "
        "shared_variables kind_of device_name "
        "TowerHandles.__contains__ TowerHandles.__getitem__ .x"
    ),
    "takes any iterable, whose items it checks": (
        "tf_variables variable_origins repeated_devices"
    ),
    "called by packages that build on this one, with what they made": (
        "call_once call_towers_once reached_sums refusing_sums check_session_graph "
        "list_pairs meet meeting_alone "
        "are_alike plain_name reduce_scatter all_gather all_to_all bytes_sent "
        "is_gathered updates_elementwise check_elementwise"
    ),
    "called by what has read its arguments, for each gradient or variable": (
        "power_of_two scalar_of shares_of unit_of weigh weight_dtype map_values "
        "narrow_source values_of "
        "with_gradient with_unique_rows add_rows has_unique_rows join_rows split_rows "
        "Gradients read_pairs.variables scale.factor "
        "apply_pairs check_any_gradient check_weights.average check_weights.num_towers "
        "create_slots follow_variables cut_flat is_small join_flat map_flat "
        "pack_tensors packed_below plan_buckets plan_packing run_independently "
        "unpack_tensors "
        "PackPlan.packed_shapes FlatModel FlatModel.__call__ "
        "FlatVariables.is_missing FlatVariables.keep_alone flat_variable_of "
        "slots_like_parts apply_by_keras copy_values ensured gradients_of_one_trace "
        "placing_calls finite_and_norm is_finite make_sums add_to_sums clear_sums"
    ),
    "called in every step": (
        "Recorder.began Recorder.during Recorder.ended "
        "Recorder.noted Recorder.clock Recorder.facts add_report report.message "
        "CallThread.surroundings CallThread.run.after_s freeze_collections.graph"
    ),
    "None is no device, as in TensorFlow": (
        "replica_device_setter.ps_device replica_device_setter.worker_device"
    ),
    "TensorFlow answers": (
        "run_in_graph.config batch_normalization.inputs batch_normalization.center "
        "batch_normalization.scale batch_normalization.beta_regularizer "
        "batch_normalization.gamma_regularizer batch_normalization.trainable "
        "batch_normalization.name batch_normalization.mean_name "
        "batch_normalization.variance_name"
    ),
}


def around(name):
    return nullcontext() if name == "flatten" else tf.Graph().as_default()


INTERFACE = Interface(
    "tw-core", GIVEN, around, named=NAMED, exempt=EXEMPT, internal=True
)


def of_another_graph():
    with tf.Graph().as_default():
        return tf.constant(0)


NO_DEVICE = [
    (value, ValueError, f"{value!r} is not a TensorFlow device string")
    for value in (None, "cpu zero", "/cpu:-1")
]
NO_TOWERS = [
    ([], ValueError, "towers is empty"),
    (["/cpu:0", 3], TypeError, "must hold tw_core.Tower; got ['/cpu:0', 3]"),
]
NO_COUNT = [(0, ValueError, "at least 1; got 0")]
NO_NAME = ({"ns_name": "", "vs_name": "scope"}, ValueError, "needs a name")
NO_PAIRS = [
    (None, TypeError, "list with one list of (gradient, variable) pairs"),
    ([], ValueError, "No gradient at all"),
    ([[("g", "w")]], TypeError, "something else at tower 0 item 0"),
]
NO_GRADIENTS = [
    ([], ValueError, "grads is empty"),
    (Late(lambda: [[tf.ones([2])], []]), ValueError, "got [1, 0] from towers 0..1"),
    ([[2.0]], TypeError, "grads[0][0] is float"),
    ([[None]], ValueError, "position 0 has gradient None in towers [0]"),
    (
        Late(lambda: [[tf.ones([2])], [tf.ones([3])]]),
        *(ValueError, "gradients of shapes ['(2,)', '(3,)'] in towers 0..1"),
    ),
]
NO_VARIABLE = [
    (None, TypeError, "TensorFlow or Keras variable; got None"),
    (np.ones(2), TypeError, "Keras variable; got array"),
]
CHECK_PAIRS = ("check_grad_list", "check_shared_grad_list")
CHECK_PAIRS += ("check_replicated_grad_list", "read_pairs")
OTHERS = {
    "elementwise.reducer": [(None, TypeError, "must be a function; got None")],
    "Tower.device": NO_DEVICE,
    "Tower": [
        ({"index": index, "total": total}, ValueError, f"got {index=}, {total=}")
        for index, total in ((1, 1), (-1, 2), (0, 0))
    ],
    "towers.devices": [
        ([], ValueError, "devices is empty; at least one tower is needed"),
        ("gpu", TypeError, "number of GPUs, or a list of ints and device strings; got"),
        (True, TypeError, "got True. Write e.g. 2, [0, 1] or ['/cpu:0', '/cpu:1']"),
        (0, ValueError, "devices must be at least 1; got 0"),
        ([True], TypeError, "A device is an int"),
        ([-1], ValueError, "0 or more; got -1"),
        (["cpu zero"], ValueError, "is not a TensorFlow device string"),
    ],
    ".towers": NO_TOWERS,
    "use_logical_cpus.count": NO_COUNT,
    "session_config.num_cpus": NO_COUNT,
    "LeastLoadedTask.ps_tasks": NO_COUNT,
    "canonical_device.device": NO_DEVICE,
    "host_of.device": NO_DEVICE[1:],
    "repeated_devices": [({"devices": [device]}, *case) for device, *case in NO_DEVICE],
    "check_known_devices.devices": [
        (["cpu zero"], ValueError, "is not a TensorFlow device string"),
    ],
    "check_devices": [
        ({"devices": ["cpu zero"]}, ValueError, "is not a TensorFlow device string"),
    ],
    "placement": [
        ({"graph": None}, TypeError, "get_concrete_function(...).graph"),
        ({"fetches": ["x", 3]}, TypeError, "tensors and operations; got ['x', 3]"),
        (
            {"fetches": [of_another_graph()]},
            *(ValueError, "fetches must be of graph; got also ['Const']"),
        ),
        ({"variables": ["x"]}, TypeError, "must hold variables; got ['x']"),
    ],
    "LeastLoadedDeviceSetter": [
        ({"ps_devices": []}, ValueError, "at least one device; got []"),
        ({"ps_devices": ["/cpu:0", 3]}, ValueError, "3 is not a TensorFlow device str"),
    ],
    "replica_device_setter": [
        ({"ps_tasks": -1}, ValueError, "at least 0; got -1"),
        ({"ps_device": 3}, ValueError, "3 is not a TensorFlow device string"),
        ({"worker_device": 0.5}, ValueError, "0.5 is not a TensorFlow device string"),
        ({"cluster": "ps:0"}, TypeError, "must be a tf.train.ClusterSpec"),
        ({"ps_ops": [None]}, TypeError, "must be a string; got None"),
    ],
    ".ns_name": [("t/", ValueError, "must not end in '/'")],
    "TrainTowerContext": [
        NO_NAME,
        *(
            ({"index": index, "total": total}, ValueError, f"got {index=}, {total=}")
            for index, total in ((1, 1), (-1, 1), (0, 0), (3, 2))
        ),
    ],
    "PredictTowerContext": [
        NO_NAME,
        ({"vs_name": "own/"}, ValueError, "names must not end in '/'"),
    ],
    "TowerContext": [
        ({"tower_name": "", "vs_name": "scope"}, ValueError, "needs a name"),
        ({"tower_name": "t/"}, ValueError, "must not end in '/'"),
    ],
    "PredictTowerContext.get_collection_in_tower": [
        ({}, RuntimeError, "enter the tower first"),
    ],
    "TowerFunc.input_signature": [
        (["x"], ValueError, "needs a name of its own"),
        ([*SPEC, *SPEC], ValueError, "got ['x', 'x']"),
    ],
    **{
        f"TowerHandle.{method}.name": [
            ("", ValueError, "must not be empty"),
        ]
        for method in ("get_tensor", "get_variable")
    },
    "TowerHandles.handles": [(None, TypeError, "a list of TowerHandle; got None")],
    "without_autograph.function": [
        (None, TypeError, "function must be a function; got None"),
    ],
    "TowerHandle.get_collection": [
        ({}, ValueError, "but not both"),
        ({"key": "a", "name": "b"}, ValueError, "but not both"),
    ],
    "Shared.devices": [
        ("/cpu:0", TypeError, "Write ('/cpu:0',)"),
        ((None,), ValueError, "None is not a TensorFlow device string"),
        (("cpu zero",), ValueError, "is not a TensorFlow device string"),
    ],
    "VariableStore.policy": [
        (Shared, TypeError, "Shared() or Replicated() object; got"),
    ],
    "replicate.factory": [
        (tf.Module(), TypeError, "factory must be a function"),
        (lambda tower: 3, TypeError, "which has no `variables`"),
    ],
    "copy_to_replicas.variable_lists": [
        ([], ValueError, "No tower's variables were given"),
        (
            [None],
            TypeError,
            "variable_lists must be a list with one list of variables per tower",
        ),
        ([[], ["w"]], TypeError, "got tower 1 number 0: str"),
    ],
    ".variable": NO_VARIABLE,
    "tf_variables.variables": [(["w"], TypeError, "Keras variable; got 'w'")],
    "variable_origins.variables": [
        ([1, "w"], TypeError, "TensorFlow or Keras variable; got 1, 'w'"),
    ],
    # What pairs may not be is in gradients/test_grad_list_checks.py.
    **{f"{name}.grad_list": NO_PAIRS for name in CHECK_PAIRS},
    "ensure_gradient_shapes.grad_list": [NO_PAIRS[0], NO_PAIRS[2]],
    "check_grad_list": [({"grad_list": [3]}, TypeError, "for towers 0 (int)")],
    "check_gradients.grads": NO_GRADIENTS,
    "read_gradients.grads": NO_GRADIENTS,
    "split_grad_list.grad_list": [
        ([None], TypeError, "something else for towers 0 (NoneType)"),
        ([zip([1], [2], strict=True)], TypeError, "for towers 0 (zip)"),
        (
            [["gv"]],
            TypeError,
            "grad_list[0] must hold (gradient, variable) pairs; got ['gv']",
        ),
        ([[(1, 2, 3)]], TypeError, "(gradient, variable) pairs; got [(1, 2, 3)]"),
    ],
    "merge_grad_list": [
        ({"all_grads": [1]}, TypeError, "for towers 0 (int)"),
        ({"all_vars": ["v"]}, TypeError, "for towers 0 (str)"),
        *(
            ({"all_grads": grads, "all_vars": variables}, ValueError, f"got {says} per")
            for grads, variables, says in [
                ([[1, 2]], [[1]], "[2] gradients and [1] variables"),
                ([[1], [2]], [[1]], "[1, 1] gradients and [1] variables"),
                ([[1], []], [[], [1]], "[1, 0] gradients and [0, 1] variables"),
            ]
        ),
    ],
    "sum_duplicate_rows.slices": [
        (np.ones(3), TypeError, "Use a dense gradient as it is"),
    ],
    "scale.grad": [(Late(lambda: tf.constant([1, 2])), TypeError, "must be floating")],
    "check_any_gradient": [
        (
            {"grads": [None], "variables": Late(lambda: [tf.Variable(1.0, name="a")])},
            *(ValueError, "any variable; got ['a"),
        ),
        ({"grads": [], "variables": []}, ValueError, "got []"),
    ],
    "check_weights": [
        ({"weights": [1, "2"]}, TypeError, "got tower 1: '2'"),
        ({"weights": [1, -2]}, ValueError, "finite and 0 or more; got tower 1: -2"),
        (
            {"weights": [1], "num_towers": 2},
            *(ValueError, "weights must be one per tower (2); got 1"),
        ),
    ],
    "check_weight.weight": [
        ("1", TypeError, "such as the number of rows; got '1'"),
        (Late(lambda: tf.ones([2])), TypeError, "got <tf.Tensor"),
        (Late(lambda: tf.constant(True)), TypeError, "a real number"),
        (-1, ValueError, "must be finite and 0 or more; got -1"),
        (float("nan"), ValueError, "got nan"),
        (float("inf"), ValueError, "got inf"),
    ],
    "join_flat.tensors": [([], ValueError, "pass at least one tensor")],
    "cut_flat.shapes": [
        ([], ValueError, "got 0, unknown: none"),
        ([(1,), [None], None], ValueError, "1 is (None,), 2 is <unknown>"),
    ],
    "unpack_tensors": [
        (
            {
                "packed": [],
                "plan": _flat_packs.PackPlan(((0, 1),), (2,)),
                "shapes": [(), (), ()],
            },
            *(ValueError, "1 packs and 1 other tensors; got 0"),
        ),
    ],
    "FlatVariables.below_bytes": [(-1, ValueError, "must be at least 0; got -1")],
    "pack_gradients.pairs": [([3], TypeError, "(gradient, variable) pairs; got [3]")],
    "check_optimizer.optimizer": [
        (v1.train.AdamOptimizer, TypeError, "got the class AdamOptimizer"),
        ("adam", TypeError, "with apply_gradients(pairs)"),
    ],
    "joined_towers.total": NO_COUNT,
    "moments_over_towers": [
        (
            {"x": np.ones([2], np.int32)},
            TypeError,
            "of a floating dtype; got int32",
        ),
        ({"axes": 1}, ValueError, "axes must be within the rank 1; got 1"),
        ({"axes": [None]}, TypeError, "axes must be a whole number; got None"),
        (
            {"x": Late(lambda: v1.placeholder(tf.float32))},
            *(ValueError, "The rank of the tensor must be known"),
        ),
    ],
    "batch_normalization": [
        ({"momentum": 1.5}, ValueError, "momentum must be below 1; got 1.5"),
        ({"epsilon": -1}, ValueError, "epsilon must be at least 0; got -1"),
        ({"axis": 2}, ValueError, "axes must be within the rank 2; got 2"),
        (
            {"inputs": Late(lambda: v1.placeholder(tf.float32, [2, None]))},
            *(ValueError, "The length of axis -1 must be known; got (2, None)"),
        ),
    ],
    "Recorder.task": [("", ValueError, "task")],
    "CallThread.name": [("", TypeError, "name must be a string; got ''")],
}


def entered(make, *args, **kwargs):
    with make(*args, **kwargs):
        pass


def in_tower(call):
    with TrainTowerContext("tower0"):
        call()


def join_towers(index):
    with synchronized.joined_towers(2) as joined, joined.tower(index):
        pass


def sum_in_function():
    def add(_):
        return tf.function(synchronized.sum_over_towers)(tf.ones([]))

    map_towers(add, OURS)


def gather_number():
    map_towers(lambda _: synchronized.gather(1.0), OURS)


ROWS = [
    *INTERFACE.rows(OTHERS),
    *(
        WrongCall(name, partial(call, *args), error, says)
        for name, call, args, error, says in [
            *(
                ("map_towers", partial(map_towers, print, OURS), *case)
                for case in [
                    ((None,), TypeError, "one item per tower; got [None]"),
                    ((3,), TypeError, "got [3]"),
                    (("ab",), TypeError, "got ['ab']"),
                    (([1],), ValueError, "got lengths [1] for 2 towers"),
                ]
            ),
            *(
                ("TrainTowerContext", partial(entered, TrainTowerContext), *case)
                for case in [
                    (("a b",), ValueError, "['a b'] cannot name scopes of a graph"),
                    (("-a",), ValueError, "['-a'] cannot name"),
                    (("t", "a:0"), ValueError, "['a:0'] cannot name"),
                ]
            ),
            ("freeze_collections", freeze_collections, (), ValueError, "name at least"),
            (
                "freeze_collections",
                freeze_collections,
                ("a", None, 3),
                TypeError,
                "got [None, 3]",
            ),
            (
                *("TowerFunc.__call__", in_tower, (TowerFunc(print, SPEC),)),
                *(ValueError, "one input per name of the signature, ['x']; got 0"),
            ),
            (
                *("Gradients", lambda: Gradients([["g"]]).variables, ()),
                *(TypeError, "read without variables"),
            ),
            (
                *("sum_over_towers", sum_in_function, ()),
                *(RuntimeError, "in the body of a tf.cond, a loop or a function"),
            ),
            ("gather", gather_number, (), ValueError, "joins the rows of tensors"),
            *(
                ("joined_towers", join_towers, *case)
                for case in [
                    ((2,), ValueError, "index must be below total=2; got 2"),
                    ((-1,), ValueError, "index must be at least 0; got -1"),
                    ((None,), TypeError, "index must be a whole number; got None"),
                ]
            ),
            (
                *("flatten", flat_variables.flatten, (dict,)),
                *(RuntimeError, "must be called outside of tf.function"),
            ),
        ]
    ),
]


class TestWrongCalls(WrongCalls):
    interface, rows, rows_in = INTERFACE, ROWS, in_graph


def test_a_check_that_is_missing_is_found():
    """The other packages' tables too have no other guard against passing idly."""
    interface = Interface("tw-core", GIVEN, calls={"towers": lambda devices: None})
    (argument,) = [a for a in interface.checked if a.function == "towers"]
    assert "towers.devices=2.5: was accepted" in interface.faults(argument)
