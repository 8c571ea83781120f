"""Calls that must be refused in a sentence, for every public name that takes any."""

from functools import cache
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf
from harness.wrong_calls import Interface, Late, WrongCall, WrongCalls, in_graph

import tw_launch
import tw_syncrep
from tw_syncrep import SyncReplicasHook, SyncReplicasOptimizer

v1 = tf.compat.v1
NAN, INF = float("nan"), float("inf")
ADDRESSES = {"ps": ("a:1",), "worker": ("b:1", "c:1")}
TASK = tw_launch.TaskConfig(ADDRESSES, "worker", 1)
OTHER_GRAPH, EAGER = tf.Graph(), tf.ones([2])
CLASS, HOOK = "SyncReplicasOptimizer", "SyncReplicasHook"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def optimizer(opt=None, aggregate=1, *args, **changes):
    opt = v1.train.GradientDescentOptimizer(1.0) if opt is None else opt
    return SyncReplicasOptimizer(opt, aggregate, *args, **changes)


def weight(name="w", dtype=tf.float32, shape=(2,)):
    return v1.get_variable(name, shape, dtype, v1.zeros_initializer())


def applied():
    made = optimizer()
    step = v1.train.get_or_create_global_step()
    made.apply_gradients([(tf.ones([2]), weight())], step)
    return made


def begun(optimizer, is_chief=True):
    made = SyncReplicasHook(optimizer, is_chief)
    made.begin()
    return made


@cache
def shared():
    """An optimizer and a hook in their graph, for calls that leave them as they are."""
    with tf.Graph().as_default() as graph:
        made = applied()
        return graph, made, begun(made)


def running_hook():
    """A hook whose session is there."""
    made = begun(shared()[1], is_chief=False)
    made._session = v1.Session()
    return made


def around(name):
    method = name.removeprefix(f"{CLASS}.")
    is_shared = name.startswith(HOOK) or method in ("get_init_tokens_op", "status")
    return (shared()[0] if is_shared else tf.Graph()).as_default()


GIVEN = {
    "opt": lambda: v1.train.GradientDescentOptimizer(1.0),
    "replicas_to_aggregate": lambda: 1,
    "grads_and_vars": lambda: [(tf.ones([2]), weight())],
    f"{CLASS}.apply_gradients.global_step": v1.train.get_or_create_global_step,
    "loss": lambda: tf.ones([]),
    "is_chief": lambda: True,
    CLASS: optimizer,
    f"{CLASS}.get_init_tokens_op": lambda: shared()[1],
    f"{CLASS}.status": lambda: shared()[1],
    f"{CLASS}.status_line": applied,
    "session": v1.Session,
    "coord": tf.train.Coordinator,
    "optimizer": lambda: shared()[1],
    HOOK: lambda: shared()[2],
    f"{HOOK}.before_run": running_hook,
    f"{HOOK}.end": running_hook,
    "is_again": lambda: False,
    "is_left": lambda: False,
    "create": lambda: lambda: SimpleNamespace(close=lambda: None),
    "servers": dict,
    "wait_timeout_s": lambda: 5,
    "start_timeout_s": lambda: 5,
    "unanswered": lambda: lambda: False,
    "step_fn": lambda: print,
    "fetches": list,
    "task": lambda: TASK,
    "config": lambda: None,
    "cluster": lambda: TASK,
}
NAMED = {".global_step": "resource variables"}
EXEMPT = {
    "takes what tf.as_dtype does, as True for float32": f"{CLASS}.compression",
    "Python or sessions call it": (
        f"TrainingSession.__exit__ {HOOK}.after_run {HOOK}.end {HOOK}.before_run"
    ),
}
INTERFACE = Interface("tw-syncrep", GIVEN, around, named=NAMED, exempt=EXEMPT)


def elsewhere(make, *arguments):
    with OTHER_GRAPH.as_default():
        return make(*arguments)


def averaged(gradient):
    """Pairs of one gradient."""
    return Late(lambda: [(gradient, weight())])


FAR = Late(lambda: v1.Session(graph=OTHER_GRAPH))
TIME = "Timeouts must be seconds above 0, or None to wait forever; got"
OTHERS = {
    CLASS: [
        ({"opt": "sgd"}, TypeError, "opt must be an optimizer such as those of tf"),
        ({"opt": keras.optimizers.SGD()}, TypeError, "which has no compute_gradients"),
        ({"opt": v1.train.AdamOptimizer}, TypeError, "the class AdamOptimizer. Pass"),
        ({"replicas_to_aggregate": 0}, ValueError, "1; got replicas_to_aggregate=0"),
        ({"total_num_replicas": 0}, ValueError, "got total_num_replicas=0"),
        ({"variable_averages": 0.9}, TypeError, "must be a tf.train.Expo"),
        ({"variables_to_average": ["w"]}, TypeError, "a list of variables; got '"),
        ({"name": ""}, ValueError, "name must not be empty"),
        ({"name": "a b"}, ValueError, "name must consist of letters, digits and ."),
        ({"replica_index": -1}, ValueError, "replica_index must be at least 0; got"),
        ({"sparse_mean": "rows"}, ValueError, "one of replicas, per_row; got 'rows'"),
        ({"fuse_below_bytes": -1}, ValueError, "must be at least 0; got -1"),
        ({"compression": "no"}, TypeError, "tf.bfloat16; got 'no'"),
        ({"compression": tf.int32}, TypeError, "tf.bfloat16; got tf.int32"),
        ({"when_replica_leaves": "x"}, ValueError, "continue, end; got 'x'"),
        ({"elastic": True, "min_replicas": 3}, ValueError, "=3 is more than"),
        ({"elastic": True, "wait_timeout_s": None}, ValueError, "elastic=True needs a"),
    ],
    ".wait_timeout_s": [
        (0, ValueError, f"{TIME} wait_timeout_s=0"),
        (INF, ValueError, f"{TIME} wait_timeout_s=inf"),
    ],
    ".start_timeout_s": [(0, ValueError, "start_timeout_s=0")],
    f"{CLASS}.compute_gradients": [
        ({"loss": None}, TypeError, "or a function that returns one; got None"),
        ({"loss": 2.0}, TypeError, "or a function that returns one; got 2.0"),
        ({"var_list": ["w"]}, TypeError, "must be a list of variables; got 'w'"),
    ],
    f"{CLASS}.apply_gradients.grads_and_vars": [
        (None, TypeError, "must be a list of (gradient, variable) pairs; got None"),
        (EAGER, TypeError, "pairs; got <tf."),
        ([], ValueError, "Must supply at least one variable"),
        ([EAGER], TypeError, "must hold (gradient, variable) pairs; got [<tf.Tensor"),
        ([(EAGER, None)], TypeError, "resource variables are supported; got None"),
        ([(EAGER, "w")], TypeError, "Only resource variables are supported; got w"),
        (averaged("g"), TypeError, "tf.IndexedSlices or None; got w:0: str"),
        (averaged(EAGER), ValueError, "default graph; got others for w:0"),
        (averaged(elsewhere(tf.ones, [2])), ValueError, "graph; got others for w:0"),
        ([(EAGER, elsewhere(weight, "far"))], ValueError, "graph; got others for far"),
    ],
    f"{CLASS}.apply_gradients.global_step": [
        (Late(lambda: weight("s", shape=())), ValueError, "scalar; got s:0 of float"),
        (Late(lambda: weight("s", tf.int64)), ValueError, "s:0 of int64 and shape"),
    ],
    f"{CLASS}.apply_gradients": [({"name": "a b"}, ValueError, "only, and begin w")],
    f"{CLASS}.apply_gradients.weight": [
        (-1, ValueError, "must be finite and 0 or more; got -1"),
        (elsewhere(tf.constant, 1), ValueError, "must belong to the default graph"),
    ],
    f"{CLASS}.get_init_tokens_op.num_tokens": [(-2, ValueError, "-2 (given) vs 0")],
    f"{CLASS}.status.session": [(FAR, ValueError, "got a session of another graph")],
    f"{CLASS}.status_line": [({"session": "s"}, TypeError, "got 's', which")],
    f"{HOOK}.optimizer": [
        (v1.train.AdamOptimizer(), TypeError, "a SyncReplicasOptimizer; got <tensorf"),
    ],
    f"{HOOK}.after_create_session.session": [
        (FAR, ValueError, "a session of another graph")
    ],
    f"{HOOK}.before_run.run_context": [(None, TypeError, "a session's; got None")],
    f"{HOOK}.end.session": [(None, TypeError, "session; got None")],
    "training_session": [
        ({"checkpoint_dir": 3}, TypeError, "must be the path of a folder; got 3"),
        ({"scaffold": "s"}, TypeError, "must be a tf.compat.v1.train.Scaffold"),
        ({"hooks": [None]}, TypeError, "got None, which has no begin, after_create"),
        ({"hooks": [v1.train.SessionRunHook]}, TypeError, "Pass an instance"),
        ({"chief_only_hooks": [3]}, TypeError, "chief_only_hooks must be hooks"),
        ({"save_checkpoint_steps": NAN}, ValueError, "save_checkpoint_steps must"),
        ({"config": "c"}, TypeError, "config must be a tf.compat.v1.ConfigProto"),
        ({"stop_grace_period_secs": -1}, ValueError, "must be at least 0; got -1"),
    ],
    "TrainingSession.run.fetches": [(None, TypeError, "fetches must be ops or")],
    "device_setter": [
        ({"strategy": "greedy"}, ValueError, "op to a server's index; got '"),
        ({"capacities": (1, 2)}, ValueError, "each parameter server; got 2 for 1"),
        ({"capacities": ["1"]}, TypeError, "capacities must be a number; got '1'"),
        ({"capacities": [0]}, ValueError, "capacities must be above 0; got 0"),
        ({"strategy": "round_robin", "capacities": [1]}, ValueError, "for strategy='b"),
    ],
    "variable_getter": [
        ({"task": "/nope:0"}, ValueError, "task '/nope:0' is not a device string"),
        ({"below_bytes": -1}, ValueError, "below_bytes must be at least 0; got -1"),
    ],
}


def closed_session():
    made = INTERFACE.call("TrainingSession")
    made.close()
    return made


def placed(strategy):
    with v1.device(tw_syncrep.device_setter(TASK, strategy=strategy)):
        return weight()


def reference():
    return v1.get_variable("ref", [2], use_resource=False)


def apply(get_variable, step=None, weight=None, **options):
    pairs = [(tf.ones([2]), get_variable())]
    return optimizer(**options).apply_gradients(pairs, step, weight=weight)


def apply_with_step(get_variable=weight, **options):
    return apply(get_variable, v1.train.get_or_create_global_step(), **options)


def late(method, *arguments):
    """Calls a method of an optimizer that has no graph yet."""
    return lambda: getattr(optimizer(), method)(*arguments)


FIRST = "call apply_gradients() or minimize() first"
# Calls in a state that does not allow them.
STATES = [
    (
        f"{CLASS}.get_chief_queue_runner",
        late("get_chief_queue_runner"),
        ValueError,
        FIRST,
    ),
    (f"{CLASS}.get_init_tokens_op", late("get_init_tokens_op"), ValueError, FIRST),
    (f"{CLASS}.status", late("status", None), ValueError, FIRST),
    (f"{CLASS}.get_slot", late("get_slot", None, "a"), TypeError, "a slot; got None"),
    (f"{CLASS}.get_slot", late("get_slot"), TypeError, "got None"),
    (
        f"{CLASS}.get_slot_names",
        late("get_slot_names", 1, 2),
        TypeError,
        "names() takes",
    ),
    (f"{CLASS}.apply_gradients", lambda: apply(weight), ValueError, "step is required"),
    (
        f"{CLASS}.apply_gradients",
        lambda: apply_with_step(reference),
        *(TypeError, "Only resource variables are supported; got ref:0"),
    ),
    (
        f"{CLASS}.apply_gradients",
        lambda: apply_with_step(weight=1, sparse_mean="per_row"),
        *(ValueError, "the replicas that touched it. Use"),
    ),
    (
        f"{CLASS}.apply_gradients",
        lambda: apply_with_step(aggregate=2),
        *(ValueError, "cannot determine which replica this is"),
    ),
    (
        f"{CLASS}.apply_gradients",
        lambda: apply_with_step(aggregate=2, replica_index=2),
        *(ValueError, "replica 2 (from replica_index=) is not"),
    ),
    (
        f"{HOOK}.begin",
        lambda: optimizer().make_session_run_hook(True).begin(),
        *(ValueError, "should be called before using the hook"),
    ),
    (
        f"{HOOK}.after_create_session",
        lambda: SyncReplicasHook(shared()[1], True).after_create_session(None, None),
        *(RuntimeError, "called before begin()"),
    ),
    *(
        (f"{HOOK}.{method}", call, RuntimeError, "called before after_create")
        for method, call in {
            "before_run": lambda: shared()[2].before_run(None),
            "after_run": lambda: shared()[2].after_run(None, None),
            "end": lambda: shared()[2].end(None),
        }.items()
    ),
    (
        "training_session",
        lambda: closed_session().run("w"),
        *(RuntimeError, "the session was closed; make a new one"),
    ),
    ("device_setter", lambda: placed(lambda op: 1), ValueError, "0; got 1 for 'w'"),
    ("device_setter", lambda: placed(lambda op: "0"), ValueError, "must return a s"),
]
ROWS = INTERFACE.rows(OTHERS)
ROWS += [WrongCall(*row) for row in STATES]


class TestWrongCalls(WrongCalls):
    interface, rows, rows_in = INTERFACE, ROWS, in_graph
