"""Calls that must be refused in a sentence, for every public name that takes any."""

import json

import pytest
from harness.wrong_calls import Interface, WrongCall, WrongCalls, in_graph

import tw_launch

NAN = float("nan")
ADDRESSES = {"ps": ("a:1",), "worker": ("b:1", "c:1")}
TASK = tw_launch.TaskConfig(ADDRESSES, "worker", 1)
GIVEN = {
    "addresses": lambda: ADDRESSES,
    "job": lambda: "worker",
    "index": lambda: 0,
    "task": lambda: TASK,
    "port": lambda: 80,
    "config": lambda: None,
    "cluster": lambda: TASK,
    "read_tf_config.text": lambda: "{}",
    "LocalCluster": lambda: tw_launch.LocalCluster(ADDRESSES, {}),
}
EXEMPT = {"is found or not": "LocalCluster.target LocalCluster.task"}
INTERFACE = Interface(
    "tw-launch", GIVEN, named={"main.arguments": "arguments?"}, exempt=EXEMPT
)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def config_of(**changes):
    wrong = {"cluster": ADDRESSES, "task": {"type": "worker", "index": 0}} | changes
    return json.dumps(wrong)


ADDRESS_MAP = "addresses must map jobs to lists of 'ho"
OTHERS = {
    "start_server.config": [({}, TypeError, "a tf.compat.v1.ConfigProto; got {}")],
    "cluster_spec.task": [({}, TypeError, "got {}")],
    "start_local": [
        ({"ps": -1}, ValueError, "needs ps >= 0 and workers >= 1; got -1 and 2"),
        ({"workers": 0}, ValueError, "workers >= 1; got 1 and 0"),
        ({"config": 1}, TypeError, "config must be a tf.compat.v1.ConfigProto; got 1"),
    ],
    "with_device_filters": [
        ({"config": "c"}, TypeError, "config must be a tf.compat.v1.ConfigProto"),
    ],
    "is_exposed.port": [(0, ValueError, "1 to 65535; got 0")],
    "LocalCluster.task": [
        (
            {"job": "boss"},
            *(ValueError, "there is no 'boss' 0; known are ps 0, worker 0, worker 1"),
        ),
        ({"index": -1}, ValueError, "there is no 'worker' -1"),
    ],
    "LocalCluster.target": [
        ({"job": None, "index": "a"}, ValueError, "there is no None 'a'"),
    ],
    "TaskConfig": [
        ({"addresses": {"worker": "a:1"}}, TypeError, ADDRESS_MAP),
        ({"addresses": {"worker": [1]}}, TypeError, ADDRESS_MAP),
        ({"addresses": {"worker": ["a"]}}, ValueError, "'a', which is not host:por"),
        ({"addresses": {}}, ValueError, "there is neither a chief nor a worker"),
        ({"job": "boss"}, ValueError, "task type 'boss' is unknown"),
        ({"index": -1}, ValueError, "index must be 0 or more; got -1"),
        ({"index": 2}, ValueError, "worker 2, but the cluster has 2 of"),
    ],
    "read_tf_config.text": [
        ("3", ValueError, "must be a JSON object"),
        *(
            (config_of(cluster=jobs), ValueError, "must map jobs to lists of 'host:po")
            for jobs in ([], {"ps": {"0": "a:1"}})
        ),
        *(
            (config_of(task=task), ValueError, "'task' must have 'type' and 'index'")
            for task in ([], {"type": "ps"})
        ),
        (
            config_of(task={"type": ["ps"], "index": 0}),
            *(ValueError, "task type ['ps'] is unknown"),
        ),
        (
            config_of(task={"type": "ps", "index": NAN}),
            *(ValueError, "task index must be 0 or more; got nan"),
        ),
    ],
}
STATES = {
    "main": [
        (
            lambda: tw_launch.main(["--ps", 1, "--", "true"]),
            *(TypeError, "argument must be a string; got 1"),
        ),
    ],
}
ROWS = INTERFACE.rows(OTHERS)
ROWS += [WrongCall(name, *case) for name, cases in STATES.items() for case in cases]


class TestWrongCalls(WrongCalls):
    interface, rows, rows_in = INTERFACE, ROWS, in_graph
