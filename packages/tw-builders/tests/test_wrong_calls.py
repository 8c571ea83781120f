"""Every public function answers a wrong call in a sentence that names it."""

import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import keras
import numpy as np
import session_builders
import tensorflow as tf
from harness.wrong_calls import Interface, Late, WrongCalls, in_graph
from one_rank import Alone

from tw_builders import AsyncRunner, ModelAverager, RankShardedOptimizer
from tw_core import towers
from tw_core.testing import CPUS

v1 = tf.compat.v1
TWO = list(CPUS[:2])
OURS = towers(TWO)
DATA = Path(__file__).parent / "data"
BUILDERS = {
    getattr(make, "func", make).__name__: make
    for name, make in session_builders.BUILDERS.items()
    if name != "spread server"
}
BUILDS = [f"{name}.build" for name in BUILDERS]
BUILDS += ["AsyncMultiGPUBuilder.build_tower_ops"]
# Functions of towers, and the first three of replicas and an optimizer for all.
AT_OWNERS = ["apply_at_owners", "apply_sharded_gradients", "make_sharded_optimizer"]
OF_REPLICAS = [*AT_OWNERS, "owned_variables", "apply_gradients", "make_optimizers"]
OF_GRADS = ["apply_at_owners", "apply_sharded_gradients", "apply_gradients"]


def descend():
    return v1.train.GradientDescentOptimizer(0.1)


def tower_pairs():
    return [(tf.ones([2]), v1.get_variable("w", [2]))]


def weight(name="w", device=""):
    with tf.device(device):
        return tf.Variable([1.0, 2.0], name=name)


def grads():
    return [[tf.ones([2])], [tf.ones([2])]]


def gradients(build):
    """Pairs of two towers, as the builder of the method ``build`` makes them."""
    builder = BUILDERS[build.partition(".")[0]](TWO)
    return builder.call_for_each_tower(tower_pairs)


def batches(**shapes):
    """A dataset of zeros of these shapes."""
    return tf.data.Dataset.from_tensors(
        {name: tf.zeros(shape) for name, shape in shapes.items()}
    )


def averager():
    return ModelAverager([[weight()]], group=Alone(), steps=2)


def rank_sharded():
    sgd = keras.optimizers.SGD(0.1)
    replicas = [[weight(device=device)] for device in TWO]
    return RankShardedOptimizer(OURS, replicas, sgd, group=Alone())


GIVEN = {
    "variables": lambda: [[weight()]],
    "group": Alone,
    "ModelAverager": averager,
    "ModelAverager.steps": lambda: 2,
    "ModelAverager.average.steps": lambda: 2,
    "RankShardedOptimizer": rank_sharded,
    "RankShardedOptimizer.optimizer": keras.optimizers.SGD,
    "whole": lambda: rank_sharded().gather(),
    "weight": lambda: 1,
    "towers": lambda: TWO,
    "devices": lambda: TWO,
    "ps_device": lambda: "cpu",
    "average": lambda: True,
    "get_opt_fn": lambda: descend,
    "tower_fn": lambda: tower_pairs,
    "func": lambda: tower_pairs,
    "grad_list": lambda: [tower_pairs()],
    **{f"{build}.grad_list": partial(gradients, build) for build in BUILDS},
    "steps": lambda: [print],
    "AsyncRunner": lambda: AsyncRunner([print], max_steps=0),
    "sync_op": lambda: None,
    "session": v1.Session,
    "coord": lambda: None,
    "grads": grads,
    "replicas": lambda: [[weight()] for _ in TWO],
    "optimizer": descend,
    "optimizers": lambda: [descend(), descend()],
    "compute": lambda: print,
    "apply": lambda: print,
    "lock": threading.Lock,
    "dataset": lambda: batches(x=[4]),
    "input": lambda: batches(x=[4]),
    "device_for_small_variables": lambda: "/cpu:0",
    "small_variable_size_threshold": lambda: 1,
    "getter": lambda: print,
    "checkpoint": lambda: str(DATA / "tensorpack_async"),
    "inputs": lambda: np.ones([2]),
    "red_axis": lambda: [0],
    "sync_statistics": lambda: "nccl",
    **{
        f"{name}.towers": lambda: OURS
        for name in [*OF_REPLICAS, "per_tower", "RankShardedOptimizer"]
    },
}
NAMED = {
    ".towers": "towers|devices",
    "StagingInput.input": "dataset",
    ".device_for_small_variables": "device strings",
}
EXEMPT = {
    "DataParallelBuilder's, and named so": " ".join(
        f"{name}.build_on_towers" for name in BUILDERS
    ),
    "Python calls it": ("AsyncRunner.__exit__"),
    "takes any array": "get_sync_bn_mean_var.inputs",
    "knows one value; a row below": "get_sync_bn_mean_var.sync_statistics",
}


def around(name):
    """The context of a call: shards over ranks refuse session graphs."""
    return nullcontext() if name.startswith("RankSharded") else in_graph()


INTERFACE = Interface("tw-builders", GIVEN, around, named=NAMED, exempt=EXEMPT)


def elsewhere():
    """A replica per tower, the second of which is on the first one's device."""
    return [[weight("w", "/cpu:0")], [weight("tower1/w", "/cpu:0")]]


def of_another_graph():
    with tf.Graph().as_default():
        return tf.ones([2])


def pairs_of(*names):
    """A tower's pairs of variables of these names."""
    return [(tf.ones([2]), v1.get_variable(name, [2])) for name in names]


def lacking_one():
    pairs = pairs_of("w", "b")
    return [pairs, pairs[:1]]


def of_references():
    return [[(tf.ones([2]), v1.Variable([1.0, 2.0], use_resource=False))]] * 2


def averaging(grads):
    """Stands for a reducer that gives means, and says so."""
    return grads


averaging.averages = True


def bad_gradients(build):
    """Cases of one gradient in both towers."""
    kinds = {
        "to another graph in towers [0, 1]": of_another_graph,
        "gradients of dtypes ['bool', 'bool']": lambda: tf.constant([True, False]),
        "of dtypes ['complex128', 'complex128']": lambda: tf.constant([1j, 2j]),
        "w has gradient None in towers [0, 1]": lambda: None,
    }

    def pairs(make):
        bad = make()
        return [[(bad, w) for _, w in tower] for tower in gradients(build)]

    return [(Late(partial(pairs, make)), ValueError, k) for k, make in kinds.items()]


DEVICES = [
    ([], ValueError, "at least one tower is needed"),
    ([-1], ValueError, "A GPU number is 0 or more; got -1"),
    (["cpu zero"], ValueError, "'cpu zero' is not a TensorFlow device string"),
]
OPTIMIZER = [
    (None, TypeError, "with apply_gradients(pairs), as tf.compat.v1"),
    (v1.train.AdamOptimizer, TypeError, "got the class AdamOptimizer"),
    (
        keras.optimizers.SGD(0.1),
        *(TypeError, "SGD, a Keras 3 optimizer, does not work in a session graph"),
    ),
]
NO_OPTIMIZER = [(lambda value=case[0]: value, *case[1:]) for case in OPTIMIZER]
NO_BATCHES = [
    (Late(lambda: batches(x=[4], y=[])), ValueError, "got 1 scalar(s). Call batch()"),
    (Late(lambda: batches(x=[4], y=[3])), ValueError, "['(4,)', '(3,)']"),
    (
        Late(lambda: batches(x=[4]).window(2)),
        *(TypeError, "dense, ragged and sparse tensors; got [DatasetSpec"),
    ),
]
SHARED = (
    {"grad_list": Late(lambda: [pairs_of("w")] * 2)},
    *(ValueError, "w:0 is one variable in towers [0, 1], and would"),
)
SEPARATE = (
    {"grad_list": Late(lambda: [pairs_of("w"), pairs_of("tower1/w")])},
    *(ValueError, "w is a separate variable in towers [1]"),
)
ONLY = descend()
SAME = ({"get_opt_fn": lambda: ONLY}, ValueError, "Towers 0 and 1 got the same")
NO_GRADS = [
    ([None, None], TypeError, "grads must be a list with one list of gradients"),
    ([["g"], ["g"]], TypeError, "something else at tower 0 item 0"),
]
NO_REPLICAS = [
    ([[]], ValueError, "one item per tower; got {"),
    ([None, None], TypeError, "or have trainable_variables; got NoneType"),
    ([["w"], ["w"]], TypeError, "must hold variables; got ['w']"),
]
NO_HOMES = [
    (Late(elsewhere), ValueError, "tower1/w:0 of tower1 is on '/device:CPU:0'"),
    (Late(lambda: [[weight()]] * 2), ValueError, "w:0"),
]
OTHERS = {
    **{f"{name}.towers": DEVICES for name in [*BUILDERS, "DataParallelBuilder"]},
    **{f"{build}.grad_list": bad_gradients(build) for build in BUILDS},
    **{f"{build}.get_opt_fn": NO_OPTIMIZER for build in BUILDS},
    **{
        build: [
            ({"grad_list": []}, ValueError, "got 0 lists for 2 towers"),
            ({"grad_list": [3, 4]}, TypeError, "one list of (gradient, variable) pai"),
            ({"grad_list": Late(lacking_one)}, ValueError, "b is missing from towers"),
            ({"grad_list": Late(of_references)}, ValueError, "reference variable"),
            *([SHARED] if "Replic" in build or "Sharded" in build else [SEPARATE]),
            *([SAME] if "Replicated" in build else []),
        ]
        for build in BUILDS
    },
    **{
        f"{name}.towers": [
            ([], ValueError, "towers is empty; make some with"),
            (TWO, TypeError, "must hold tw_core.Tower; got ['/cpu:0', '/cpu:1']"),
        ]
        for name in [*OF_REPLICAS, "per_tower"]
    },
    **{f"{name}.replicas": NO_REPLICAS for name in OF_REPLICAS[4:]},
    **{f"{name}.replicas": [*NO_REPLICAS, *NO_HOMES] for name in OF_REPLICAS[:4]},
    **{f"{name}.grads": NO_GRADS for name in OF_GRADS},
    "DataParallelBuilder.call_for_each_tower": [
        *(({"towers": value}, *case) for value, *case in DEVICES),
        ({"devices": TWO[:1]}, ValueError, "got {'devices': 1} for 2 towers"),
        ({"devices": [3, None]}, TypeError, "strings and functions; got [3, None]"),
        ({"devices": ["cpu zero", None]}, ValueError, "is not a TensorFlow device str"),
        ({"use_vs": [None, None]}, TypeError, "must be True or False; got None"),
        ({"func": weight}, ValueError, "may not make trainable variables"),
    ],
    "SyncMultiGPUParameterServerBuilder.ps_device": [
        ("tpu", ValueError, "ps_device must be 'cpu' (all"),
    ],
    "SyncMultiGPUReplicatedBuilder.mode": [
        ("ring", ValueError, "Unknown mode 'ring'"),
        (averaging, ValueError, "mode averages already"),
    ],
    ".flat_below_bytes": [(-1, ValueError, "at least 0; got -1")],
    "per_tower.dataset": NO_BATCHES,
    "per_tower.prefetch": [(0, ValueError, "prefetch must be at least 1; got 0")],
    "apply_gradients": [
        ({"grads": [[None], [None]]}, ValueError, "w has gradient None in towers [0]"),
        (
            {"grads": Late(lambda: [[tf.ones([2])], [tf.ones([3])]])},
            *(ValueError, "gradients of shapes ['(2,)', '(3,)']"),
        ),
        (
            {"replicas": Late(lambda: [[keras.Variable(np.ones(2, "f"))]] * 2)},
            *(ValueError, "is one variable in towers [0, 1], and would"),
        ),
        ({"optimizers": []}, ValueError, "one item per tower"),
        ({"optimizers": [descend()] * 2}, ValueError, "Towers 0 and 1 got the same"),
        *(({"optimizers": [value] * 2}, *case) for value, *case in OPTIMIZER[:2]),
    ],
    "apply_sharded_gradients": [
        ({"grads": [[None], [None]]}, ValueError, "w has gradient None in towers [0]"),
        *(({"optimizer": value}, *case) for value, *case in OPTIMIZER),
        ({"optimizer": [descend()] * 2}, TypeError, "got list"),
    ],
    "apply_at_owners": [
        ({"grads": [[], []]}, ValueError, "the same lengths; got [0, 0] gradients"),
        ({"grads": [[None], [None]]}, ValueError, "any variable; got ['w"),
        (
            {"grads": Late(lambda: [[tf.ones([2])], [None]])},
            *(ValueError, "in some towers for w"),
        ),
        ({"grads": Late(lambda: [[tf.ones([3])]] * 2)}, ValueError, "w"),
        *(({"optimizer": value}, *case) for value, *case in OPTIMIZER[:2]),
    ],
    "make_sharded_optimizer.get_opt_fn": NO_OPTIMIZER,
    "make_optimizers.get_opt_fn": NO_OPTIMIZER,
    "apply_shared_gradients": [
        SEPARATE,
        ({"grad_list": []}, ValueError, "No gradient at all"),
        ({"grad_list": [[("g", "w")]]}, TypeError, "something else at tower 0 item 0"),
        ({"average": False, "weights": [1]}, ValueError, "weights apply to a mean"),
        (
            {"grad_list": Late(lambda: [[(None, weight())]])},
            *(ValueError, "has gradient None in towers [0]"),
        ),
        *(({"optimizer": value}, *case) for value, *case in OPTIMIZER[:2]),
    ],
    "ModelAverager.steps": [(0, ValueError, "steps must be at least 1; got 0")],
    "ModelAverager.after_step.weight": [(-1, ValueError, "at least 0; got -1")],
    "RankShardedOptimizer.replicas": [
        ([["w"]], ValueError, "must hold one item per tower"),
    ],
    "RankShardedOptimizer.apply": [
        ({"grads": Late(lambda: grads()[:1])}, ValueError, "got [1] gradients and"),
        ({"grads": [[], []]}, ValueError, "got [0, 0] gradients"),
        ({"average": False, "weights": [1, 1]}, ValueError, "pass average=True"),
    ],
    "RankShardedOptimizer.scatter.whole": [
        (keras.optimizers.Adam(), TypeError, "of class SGD; got Adam"),
        (None, TypeError, "whole must be, on rank 0, the optimizer that gather"),
        (keras.optimizers.SGD(0.1), ValueError, "of shapes [(2,)]; got shapes []"),
    ],
    "AsyncRunner.steps": [([], ValueError, "must be a non-empty list of callables")],
    "AsyncRunner.max_steps": [(-1, ValueError, "at least 0; got -1")],
    "AsyncRunner.join.timeout_s": [
        (-1, ValueError, "at least 0; got -1"),
        (1.0, RuntimeError, "was not started"),
    ],
    "locked_step.lock": [
        (None, TypeError, "lock must be a threading.Lock(); got None"),
    ],
    "StagingInput.input": NO_BATCHES[:1],
    "StagingInput": [
        ({"devices": []}, ValueError, "devices is empty"),
        ({"nr_stage": 0}, ValueError, "at least 1; got 0"),
    ],
    "get_sync_bn_mean_var.sync_statistics": [
        ("horovod", ValueError, "by sync_statistics='nccl'; got 'horovod'"),
    ],
    "assignment_map": [
        ({"checkpoint": ""}, ValueError, "must not be empty"),
        ({"checkpoint": "/nowhere/model"}, ValueError, "model' is neither a checkpoin"),
        ({}, ValueError, "a non-empty list of variables"),
        ({"variables": ["w", None]}, TypeError, "got ['w', None]"),
    ],
}


ROWS = INTERFACE.rows(OTHERS)


class TestWrongCalls(WrongCalls):
    interface, rows = INTERFACE, ROWS
