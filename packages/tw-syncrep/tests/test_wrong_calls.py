"""Calls that must be refused in a sentence, for every public name that takes any."""

import json
from functools import partial
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

import tw_syncrep
from tw_core.testing import WrongCall, check_wrong_call, names_without_wrong_calls
from tw_syncrep import (
    SyncReplicasHook,
    SyncReplicasOptimizer,
    TrainingSession,
    cluster,
    training_session,
)
from tw_syncrep import launch as launcher

v1 = tf.compat.v1
NAN, INF = float("nan"), float("inf")
ADDRESSES = {"ps": ("a:1",), "worker": ("b:1", "c:1")}
TASK = cluster.TaskConfig(ADDRESSES, "worker", 1)
OTHER_GRAPH, EAGER = tf.Graph(), tf.ones([2])
CLASS, HOOK = "SyncReplicasOptimizer", "SyncReplicasHook"
WHOLE, FLAG = "must be a whole number; got", "must be True or False; got"
TIME = "timeouts must be seconds above 0, or None to wait forever; got"

# Records that the package makes and hands out; users make none.
HANDED_OUT = ["Status"]
HANDED_OUT_BY_CLUSTER = ["CachedParameter", "LocalCluster"]


@pytest.fixture(autouse=True)
def graph(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with tf.Graph().as_default() as graph:
        yield graph


def optimizer(opt=None, aggregate=1, *args, **changes):
    opt = v1.train.GradientDescentOptimizer(1.0) if opt is None else opt
    return SyncReplicasOptimizer(opt, aggregate, *args, **changes)


def weight(name="w", dtype=tf.float32, shape=(2,)):
    return v1.get_variable(name, shape, dtype, v1.zeros_initializer())


def placed(**arguments):
    with v1.device(cluster.device_setter(TASK, **arguments)):
        return weight()


def apply(pairs=None, *args, step=None, **changes):
    pairs = [(tf.ones([2]), weight())] if pairs is None else pairs
    step = v1.train.get_or_create_global_step() if step is None else step
    made = optimizer()
    made.apply_gradients(pairs, step, *args, **changes)
    return made


def in_other_graph(make):
    with OTHER_GRAPH.as_default():
        return make()


def hook(*args, **changes):
    made = SyncReplicasHook(apply(), *args, **changes)
    made.begin()
    return made


def running_hook():
    """A hook whose session is there."""
    made = hook(is_chief=False)
    made._session = v1.Session()
    return made


def session(create=lambda: SimpleNamespace(close=lambda: None), **changes):
    arguments = {
        "servers": {},
        "wait_timeout_s": 5,
        "start_timeout_s": 5,
        "unanswered": lambda: False,
    } | changes
    return TrainingSession(create, **arguments)


def closed_session():
    made = session()
    made.close()
    return made


def entered(context):
    with context:
        pass


def local_cluster():
    return cluster.LocalCluster(ADDRESSES, {})


def config_of(**changes):
    wrong = {"cluster": ADDRESSES, "task": {"type": "worker", "index": 0}} | changes
    return json.dumps(wrong)


CONSTRUCTED = [
    WrongCall(CLASS, partial(optimizer, *args, **changes), error, says)
    for args, changes, error, says in [
        (("sgd",), {}, TypeError, "opt must be an optimizer such as those of tf.comp"),
        ((keras.optimizers.SGD(),), {}, TypeError, "which has no compute_gradients"),
        ((v1.train.AdamOptimizer,), {}, TypeError, "the class AdamOptimizer. Make an"),
        (
            (None, None),
            {},
            ValueError,
            "whole numbers of at least 1; got replicas_to_a",
        ),
        ((None, "2"), {}, ValueError, "got replicas_to_aggregate='2'"),
        ((None, 1.5), {}, ValueError, "got replicas_to_aggregate=1.5"),
        ((None, True), {}, ValueError, "got replicas_to_aggregate=True"),
        ((None, NAN), {}, ValueError, "got replicas_to_aggregate=nan"),
        ((None, 1, 0), {}, ValueError, "got total_num_replicas=0"),
        ((None, 1, "a"), {}, ValueError, "got total_num_replicas='a'"),
        ((None, 1, 1, 0.9), {}, TypeError, "variable_averages must be a tf.train.Expo"),
        (
            (None, 1, 1, None, ["w"]),
            {},
            TypeError,
            "must be a list of variables; got '",
        ),
        ((None, 1, 1, None, None, "no"), {}, TypeError, f"use_locking {FLAG}"),
        ((), {"name": None}, TypeError, "name must be a string"),
        ((), {"name": ""}, ValueError, "name must not be empty"),
        (
            (),
            {"name": "a b"},
            ValueError,
            "name must have letters, digits and ./_- only",
        ),
        ((), {"replica_index": "0"}, TypeError, f"replica_index {WHOLE} '0'"),
        ((), {"replica_index": 0.5}, TypeError, f"replica_index {WHOLE} 0.5"),
        (
            (),
            {"replica_index": -1},
            ValueError,
            "replica_index must be at least 0; got",
        ),
        ((), {"sparse_mean": None}, ValueError, "one of replicas, per_row; got None"),
        ((), {"fuse_below_bytes": None}, TypeError, f"fuse_below_bytes {WHOLE} None"),
        ((), {"fuse_below_bytes": 2.5}, TypeError, f"fuse_below_bytes {WHOLE} 2.5"),
        ((), {"fuse_below_bytes": "1k"}, TypeError, f"fuse_below_bytes {WHOLE} '1k'"),
        (
            (),
            {"fuse_below_bytes": -1},
            ValueError,
            "fuse_below_bytes must be at least 0; got -1",
        ),
        ((), {"compression": "no"}, TypeError, "tf.bfloat16; got 'no'"),
        ((), {"compression": tf.int32}, TypeError, "tf.bfloat16; got tf.int32"),
        ((), {"compression": 3.5}, TypeError, "tf.bfloat16; got 3.5"),
        ((), {"wait_timeout_s": NAN}, ValueError, f"{TIME} wait_timeout_s=nan, start"),
        ((), {"wait_timeout_s": INF}, ValueError, f"{TIME} wait_timeout_s=inf"),
        ((), {"wait_timeout_s": -1}, ValueError, f"{TIME} wait_timeout_s=-1"),
        ((), {"wait_timeout_s": "5"}, TypeError, f"{TIME} wait_timeout_s='5'"),
        ((), {"wait_timeout_s": True}, TypeError, f"{TIME} wait_timeout_s=True"),
        ((), {"start_timeout_s": 0}, ValueError, f"{TIME} start_timeout_s=0"),
        ((), {"when_replica_leaves": None}, ValueError, "continue, end; got None"),
    ]
]
METHODS = [
    WrongCall(f"{CLASS}.{name}", call, error, says)
    for name, call, error, says in [
        (
            "compute_gradients",
            lambda: optimizer().compute_gradients(None),
            TypeError,
            "loss must be a tensor, or a function that returns one; got None",
        ),
        (
            "compute_gradients",
            lambda: optimizer().minimize(2.0),
            TypeError,
            "loss must be a tensor, or a function that returns one; got 2.0",
        ),
        (
            "compute_gradients",
            lambda: optimizer().compute_gradients(tf.ones([]), ["w"]),
            TypeError,
            "var_list must be a list of variables; got 'w'",
        ),
        ("apply_gradients", lambda: apply("ab"), TypeError, "pairs; got 'ab'"),
        ("apply_gradients", lambda: apply(3), TypeError, "pairs; got 3"),
        (
            "apply_gradients",
            lambda: optimizer().apply_gradients(None),
            TypeError,
            "must be a list of (gradient, variable) pairs; got None",
        ),
        ("apply_gradients", lambda: apply(tf.ones([2])), TypeError, "pairs; got <tf."),
        ("apply_gradients", lambda: apply([]), ValueError, "no (gradient, variable) p"),
        (
            "apply_gradients",
            lambda: apply([tf.ones([2])]),
            TypeError,
            "must hold (gradient, variable) pairs; got <tf.Tensor",
        ),
        (
            "apply_gradients",
            lambda: apply([(tf.ones([2]), None)]),
            TypeError,
            "only resource variables are supported; got None",
        ),
        (
            "apply_gradients",
            lambda: apply([(tf.ones([2]), "w")]),
            TypeError,
            "only resource variables are supported; got w",
        ),
        (
            "apply_gradients",
            lambda: apply([("g", weight())]),
            TypeError,
            "tf.IndexedSlices or None; got w:0: str",
        ),
        (
            "apply_gradients",
            lambda: apply([(in_other_graph(lambda: tf.ones([2])), weight())]),
            ValueError,
            "belong to the default graph; got others for w:0",
        ),
        (
            "apply_gradients",
            lambda: apply([(tf.ones([2]), in_other_graph(lambda: weight("far")))]),
            ValueError,
            "belong to the default graph; got others for far",
        ),
        (
            "apply_gradients",
            lambda: apply([(EAGER, weight())]),
            ValueError,
            "belong to the default graph; got others for w:0",
        ),
        (
            "apply_gradients",
            lambda: apply(step="step"),
            TypeError,
            "only resource variables are supported; got step",
        ),
        (
            "apply_gradients",
            lambda: apply(step=weight("s", shape=())),
            ValueError,
            "global_step must be a scalar of whole numbers; got s:0 of float32",
        ),
        (
            "apply_gradients",
            lambda: apply(step=weight("s", tf.int64)),
            ValueError,
            "global_step must be a scalar of whole numbers; got s:0 of int64 and shape",
        ),
        (
            "apply_gradients",
            lambda: apply(None, "a b"),
            ValueError,
            "only, and begin w",
        ),
        ("apply_gradients", lambda: apply(None, 7), TypeError, "name must be a string"),
        (
            "get_init_tokens_op",
            lambda: apply().get_init_tokens_op(None),
            TypeError,
            f"num_tokens {WHOLE} None",
        ),
        (
            "get_init_tokens_op",
            lambda: apply().get_init_tokens_op(1.5),
            TypeError,
            f"num_tokens {WHOLE} 1.5",
        ),
        (
            "get_init_tokens_op",
            lambda: apply().get_init_tokens_op(-2),
            ValueError,
            "-2 (given) vs 0 (needed)",
        ),
        (
            "get_init_tokens_op",
            lambda: optimizer().get_init_tokens_op(),
            ValueError,
            "call apply_gradients() or minimize() first",
        ),
        (
            "make_session_run_hook",
            lambda: optimizer().make_session_run_hook("yes"),
            TypeError,
            f"is_chief {FLAG} 'yes'",
        ),
        (
            "make_session_run_hook",
            lambda: optimizer().make_session_run_hook(True, "3"),
            TypeError,
            f"num_tokens {WHOLE} '3'",
        ),
        (
            "get_slot",
            lambda: optimizer().get_slot(None, "momentum"),
            TypeError,
            "must be a variable, the second the name of a slot; got None",
        ),
        ("get_slot", lambda: optimizer().get_slot(), TypeError, "got None"),
        (
            "status",
            lambda: optimizer().status(None),
            ValueError,
            "call apply_gradients() or minimize() first",
        ),
        (
            "status",
            lambda: apply().status(None),
            TypeError,
            "session must be a session",
        ),
        (
            "status",
            lambda: apply().status(v1.Session(graph=OTHER_GRAPH)),
            ValueError,
            "got one of another graph",
        ),
        ("status_line", lambda: apply().status_line("s"), TypeError, "got 's', which"),
        (
            "get_slot_names",
            lambda: optimizer().get_slot_names(1, 2, 3),
            TypeError,
            "get_slot_names() takes",
        ),
    ]
]
HOOKS = [
    WrongCall(HOOK if name is None else f"{HOOK}.{name}", call, error, says)
    for name, call, error, says in [
        (
            None,
            lambda: SyncReplicasHook(None, True),
            TypeError,
            "optimizer must be a SyncReplicasOptimizer; got None",
        ),
        (
            None,
            lambda: SyncReplicasHook(v1.train.AdamOptimizer(), True),
            TypeError,
            "optimizer must be a SyncReplicasOptimizer; got <tensorflow",
        ),
        (None, lambda: SyncReplicasHook(optimizer(), None), TypeError, FLAG),
        (None, lambda: SyncReplicasHook(optimizer(), True, 0.5), TypeError, WHOLE),
        (
            None,
            lambda: SyncReplicasHook(optimizer(), True, ends_all="yes"),
            TypeError,
            f"ends_all {FLAG} 'yes'",
        ),
        (
            "after_create_session",
            lambda: SyncReplicasHook(apply(), True).after_create_session(None, None),
            RuntimeError,
            "called before begin()",
        ),
        (
            "after_create_session",
            lambda: hook(True).after_create_session(None, tf.train.Coordinator()),
            TypeError,
            "session must be a session; got None",
        ),
        (
            "after_create_session",
            lambda: hook(True).after_create_session(v1.Session(), None),
            TypeError,
            "coord must be a tf.train.Coordinator; got None",
        ),
        (
            "after_create_session",
            lambda: hook(True).after_create_session(
                v1.Session(graph=OTHER_GRAPH), tf.train.Coordinator()
            ),
            ValueError,
            "got one of another graph",
        ),
        (
            "before_run",
            lambda: hook(True).before_run(None),
            RuntimeError,
            "called before after_create_session()",
        ),
        (
            "before_run",
            lambda: running_hook().before_run(None),
            TypeError,
            "run_context must be a session's; got None",
        ),
        (
            "after_run",
            lambda: hook(True).after_run(None, None),
            RuntimeError,
            "called before after_create_session()",
        ),
        (
            "end",
            lambda: hook(True).end(None),
            RuntimeError,
            "called before after_create_session()",
        ),
        ("end", lambda: running_hook().end(None), TypeError, "session; got None"),
        (
            "is_under_way",
            lambda: hook(True).is_under_way(None, is_again=False),
            TypeError,
            "session must be a session; got None",
        ),
        (
            "is_under_way",
            lambda: hook(True).is_under_way(v1.Session(), is_again=1),
            TypeError,
            f"is_again {FLAG} 1",
        ),
        (
            "release",
            lambda: hook(True).release(is_left=None),
            TypeError,
            f"is_left {FLAG} None",
        ),
    ]
]
SESSIONS = [
    *(
        WrongCall("training_session", partial(training_session, **changes), error, says)
        for changes, error, says in [
            ({"master": None}, TypeError, "master must be a string; got None"),
            ({"master": 3}, TypeError, "master must be a string; got 3"),
            ({"is_chief": None}, TypeError, f"is_chief {FLAG} None"),
            ({"checkpoint_dir": 3}, TypeError, "must be the path of a folder; got 3"),
            ({"summary_dir": 3}, TypeError, "must be the path of a folder; got 3"),
            ({"scaffold": "s"}, TypeError, "must be a tf.compat.v1.train.Scaffold"),
            ({"hooks": "h"}, TypeError, "hooks must be a list of hooks; got 'h'"),
            ({"hooks": 3}, TypeError, "hooks must be a list of hooks; got 3"),
            (
                {"hooks": [None]},
                TypeError,
                "got None, which has no begin, after_create",
            ),
            (
                {"hooks": [v1.train.SessionRunHook]},
                TypeError,
                "got the class SessionRunHook. Make an object of it",
            ),
            ({"chief_only_hooks": [3]}, TypeError, "chief_only_hooks must be hooks"),
            (
                {"save_checkpoint_secs": "a"},
                TypeError,
                "save_checkpoint_secs must be a",
            ),
            ({"save_checkpoint_steps": NAN}, ValueError, "save_checkpoint_steps must"),
            ({"save_summaries_steps": []}, TypeError, "save_summaries_steps must be a"),
            (
                {"save_summaries_secs": "a"},
                TypeError,
                "save_summaries_secs must be a n",
            ),
            (
                {"log_step_count_steps": "a"},
                TypeError,
                "log_step_count_steps must be a",
            ),
            ({"config": "c"}, TypeError, "config must be a tf.compat.v1.ConfigProto"),
            ({"stop_grace_period_secs": -1}, ValueError, "must be at least 0; got -1"),
            ({"stop_grace_period_secs": None}, TypeError, "must be a number; got None"),
            ({"max_wait_secs": NAN}, ValueError, "max_wait_secs must be a number; got"),
            ({"max_wait_secs": "a"}, TypeError, "max_wait_secs must be a number; got"),
            ({"save_graph_def": 1}, TypeError, f"save_graph_def {FLAG} 1"),
            ({"cluster": "c"}, TypeError, "must be a cluster.TaskConfig, or None; got"),
            ({"wait_timeout_s": NAN}, ValueError, f"{TIME} wait_timeout_s=nan"),
            ({"wait_timeout_s": "a"}, TypeError, f"{TIME} wait_timeout_s='a'"),
            ({"start_timeout_s": -1}, ValueError, f"{TIME} start_timeout_s=-1"),
        ]
    ),
    *(
        WrongCall(f"TrainingSession{method}", call, error, says)
        for method, call, error, says in [
            ("", lambda: session(None), TypeError, "create must be a function"),
            (
                "",
                lambda: session(servers=["a:1"]),
                TypeError,
                "servers must be addresse",
            ),
            (
                "",
                lambda: session(unanswered=1),
                TypeError,
                "unanswered must be a functi",
            ),
            (
                "",
                lambda: session(wait_timeout_s=0),
                ValueError,
                f"{TIME} wait_timeout_s=",
            ),
            (".run", lambda: session().run(None), TypeError, "fetches must be ops and"),
            (
                ".run_step_fn",
                lambda: session().run_step_fn(None),
                TypeError,
                "step_fn must be a function; got None",
            ),
        ]
    ),
    WrongCall(
        "training_session",
        lambda: closed_session().run("w"),
        RuntimeError,
        "the session was closed; make a new one",
    ),
]
CLUSTERS = [
    WrongCall(name, call, error, says)
    for name, call, error, says in [
        ("cluster_spec", lambda: cluster.cluster_spec(None), TypeError, "got None"),
        ("cluster_spec", lambda: cluster.cluster_spec({}), TypeError, "got {}"),
        ("start_server", lambda: cluster.start_server("ps"), TypeError, "got 'ps'"),
        (
            "start_server",
            lambda: cluster.start_server(TASK, config={}),
            TypeError,
            "config must be a tf.compat.v1.ConfigProto; got {}",
        ),
        (
            "start_server",
            lambda: cluster.start_server(TASK, keep_memory="no"),
            TypeError,
            f"keep_memory {FLAG} 'no'",
        ),
        ("device_setter", lambda: cluster.device_setter(None), TypeError, "got None"),
        (
            "device_setter",
            lambda: cluster.device_setter("/job:worker"),
            TypeError,
            "task must be a cluster.TaskConfig",
        ),
        (
            "device_setter",
            lambda: cluster.device_setter(TASK, strategy="greedy"),
            ValueError,
            "strategy must be 'bytes', 'round_robin' or a function from an op to the "
            "number of a server; got 'greedy'",
        ),
        (
            "device_setter",
            lambda: cluster.device_setter(TASK, strategy=None),
            TypeError,
            "strategy must be 'bytes', 'round_robin' or a function from an op to the "
            "number of a server; got None",
        ),
        (
            "device_setter",
            lambda: placed(strategy=lambda op: 1),
            ValueError,
            "number of one of 1 servers, from 0; got 1 for 'w'",
        ),
        (
            "device_setter",
            lambda: placed(strategy=lambda op: "0"),
            ValueError,
            "strategy must return the number of one of 1 servers, from 0; got '0'",
        ),
        (
            "device_setter",
            lambda: cluster.device_setter(TASK, capacities=2),
            TypeError,
            "capacities must be a list of numbers; got 2",
        ),
        (
            "device_setter",
            lambda: cluster.device_setter(TASK, capacities=(1, 2)),
            ValueError,
            "capacities must have one number for each parameter server; got 2 for 1",
        ),
        (
            "device_setter",
            lambda: cluster.device_setter(TASK, capacities=[0]),
            ValueError,
            "capacities must be above 0; got 0",
        ),
        (
            "device_setter",
            lambda: cluster.device_setter(TASK, capacities=["1"]),
            TypeError,
            "capacities must be a number; got '1'",
        ),
        (
            "device_setter",
            lambda: cluster.device_setter(TASK, strategy="round_robin", capacities=[1]),
            ValueError,
            "capacities are for strategy='bytes'; got [1] with 'round_robin'",
        ),
        (
            "variable_getter",
            lambda: cluster.variable_getter(None),
            TypeError,
            "got None",
        ),
        (
            "variable_getter",
            lambda: cluster.variable_getter("/nope:0"),
            ValueError,
            "task '/nope:0' is not a device string",
        ),
        (
            "variable_getter",
            lambda: cluster.variable_getter(TASK, below_bytes=2.5),
            TypeError,
            f"below_bytes {WHOLE} 2.5",
        ),
        (
            "variable_getter",
            lambda: cluster.variable_getter(TASK, below_bytes=-1),
            ValueError,
            "below_bytes must be at least 0; got -1",
        ),
        (
            "pulled_together",
            lambda: entered(cluster.pulled_together(7)),
            TypeError,
            "task must be a cluster.TaskConfig",
        ),
        (
            "pulled_together",
            lambda: entered(cluster.pulled_together(TASK, below_bytes=None)),
            TypeError,
            f"below_bytes {WHOLE} None",
        ),
        (
            "start_local",
            lambda: cluster.start_local(ps="1"),
            TypeError,
            f"ps {WHOLE} '1'",
        ),
        (
            "start_local",
            lambda: cluster.start_local(workers=1.5),
            TypeError,
            f"workers {WHOLE} 1.5",
        ),
        (
            "start_local",
            lambda: cluster.start_local(ps=-1),
            ValueError,
            "needs ps >= 0 and workers >= 1; got -1 and 2",
        ),
        (
            "start_local",
            lambda: cluster.start_local(config=1),
            TypeError,
            "config must be a tf.compat.v1.ConfigProto; got 1",
        ),
        (
            "with_device_filters",
            lambda: cluster.with_device_filters("c", TASK),
            TypeError,
            "config must be a tf.compat.v1.ConfigProto",
        ),
        (
            "with_device_filters",
            lambda: cluster.with_device_filters(None, "c"),
            TypeError,
            "task must be a cluster.TaskConfig",
        ),
        (
            "is_exposed",
            lambda: cluster.is_exposed("80"),
            TypeError,
            f"port {WHOLE} '80'",
        ),
        ("is_exposed", lambda: cluster.is_exposed(0), ValueError, "1 to 65535; got 0"),
        (
            "is_exposed",
            lambda: cluster.is_exposed(80, proc="/proc/net"),
            TypeError,
            "proc must be a pathlib.Path; got '/proc/net'",
        ),
        (
            "LocalCluster.task",
            lambda: local_cluster().task("boss", 0),
            ValueError,
            "there is no 'boss' 0; known are ps 0, worker 0, worker 1",
        ),
        (
            "LocalCluster.task",
            lambda: local_cluster().task("worker", -1),
            ValueError,
            "there is no 'worker' -1",
        ),
        (
            "LocalCluster.target",
            lambda: local_cluster().target(None, "a"),
            ValueError,
            "there is no None 'a'",
        ),
    ]
]
TASKS = [
    *(
        WrongCall("TaskConfig", partial(cluster.TaskConfig, *args), error, says)
        for args, error, says in [
            ((None, "worker", 0), TypeError, "addresses must map jobs to lists of 'ho"),
            (({"worker": "a:1"}, "worker", 0), TypeError, "addresses must map jobs to"),
            (({"worker": [1]}, "worker", 0), TypeError, "addresses must map jobs to l"),
            ((ADDRESSES, None, 0), TypeError, "job must be a string; got None"),
            ((ADDRESSES, "boss", 0), ValueError, "task type 'boss' is unknown"),
            ((ADDRESSES, "worker", "0"), TypeError, f"index {WHOLE} '0'"),
            ((ADDRESSES, "worker", 0.5), TypeError, f"index {WHOLE} 0.5"),
            ((ADDRESSES, "worker", -1), ValueError, "index must be 0 or more; got -1"),
            (
                (ADDRESSES, "worker", 2),
                ValueError,
                "worker 2, but the cluster has 2 of",
            ),
            (({"worker": ["a"]}, "worker", 0), ValueError, "'a', which is no host:por"),
            (({}, "worker", 0), ValueError, "there is neither a chief nor a worker"),
        ]
    ),
    *(
        WrongCall("read_tf_config", partial(cluster.read_tf_config, text), error, says)
        for text, error, says in [
            ({"cluster": {}}, TypeError, "text must be a string"),
            (b"{}", TypeError, "text must be a string"),
            ("{", ValueError, "is no JSON"),
            ("[1]", ValueError, "must be a JSON object"),
            ("3", ValueError, "must be a JSON object"),
            ("{}", ValueError, "there is neither a chief nor a worker"),
            (config_of(cluster=None), ValueError, "must map jobs to lists of 'host:po"),
            (config_of(cluster=[]), ValueError, "must map jobs to lists of 'host:port"),
            (config_of(cluster={"ps": {"0": "a:1"}}), ValueError, "must map jobs to"),
            (config_of(task=None), ValueError, "'task' must have 'type' and 'index'"),
            (
                config_of(task=[]),
                ValueError,
                "'task' must have 'type' and 'index'; got",
            ),
            (config_of(task={"type": "ps"}), ValueError, "'task' must have 'type' and"),
            (
                config_of(task={"type": ["ps"], "index": 0}),
                ValueError,
                "task type ['ps'] is unknown",
            ),
            (
                config_of(task={"type": "ps", "index": None}),
                ValueError,
                "task index must be 0 or more; got None",
            ),
            (
                config_of(task={"type": "ps", "index": 0.5}),
                ValueError,
                "task index must be 0 or more; got 0.5",
            ),
            (
                config_of(task={"type": "ps", "index": NAN}),
                ValueError,
                "task index must be 0 or more; got nan",
            ),
        ]
    ),
]
LAUNCHES = [
    WrongCall("main", partial(launcher.main, arguments), TypeError, says)
    for arguments, says in [
        ("--ps 1", "arguments must be a list of items; got '--ps 1'"),
        (3, "arguments must be a list of items; got 3"),
        (["--ps", 1, "--", "true"], "argument must be a string; got 1"),
    ]
]
TOP, BELOW = [*CONSTRUCTED, *METHODS, *HOOKS, *SESSIONS], [*CLUSTERS, *TASKS]


@pytest.mark.parametrize(
    "row", [*TOP, *BELOW, *LAUNCHES], ids=lambda row: f"{row.name}: {row.says}"
)
def test_a_wrong_call_is_refused_in_a_sentence(row):
    check_wrong_call(row)


def test_every_public_name_has_wrong_calls():
    assert names_without_wrong_calls(tw_syncrep, TOP, exempt=HANDED_OUT) == []
    assert names_without_wrong_calls(cluster, BELOW, exempt=HANDED_OUT_BY_CLUSTER) == []


@pytest.mark.parametrize(
    ("text", "says"), [('{"cluster": []}', "must map jobs"), ("[]", "a JSON object")]
)
def test_a_wrong_tf_config_is_no_missing_one(monkeypatch, text, says):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=says):
        cluster.find_tf_config()


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--ps", "1.5", "argument --ps: must be 0 or more; got '1.5'"),
        ("--workers", "two", "argument --workers: must be 0 or more; got 'two'"),
        ("--gpus-per-task", "-1", "--gpus-per-task: must be 0 or more; got '-1'"),
        ("--max-restarts", "-1", "--max-restarts: must be 0 or more; got '-1'"),
        ("--grace", "nan", "--grace: must be seconds, 0 or more; got 'nan'"),
        ("--grace", "inf", "--grace: must be seconds, 0 or more; got 'inf'"),
        ("--grace", "-1", "--grace: must be seconds, 0 or more; got '-1'"),
        ("--grace", "soon", "--grace: must be seconds, 0 or more; got 'soon'"),
    ],
)
def test_wrong_options_of_a_launch_are_refused(capsys, option, value, says):
    with pytest.raises(SystemExit) as caught:
        launcher.main([option, value, "--", "true"])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err
