"""TF_CONFIG is read, and what is wrong with it is named."""

import json

import pytest

from tw_launch import find_tf_config, read_tf_config

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


def config(cluster=CLUSTER, job="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


@pytest.mark.parametrize(
    "job, index, replica",
    [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2), ("ps", 0, None)],
)
def test_replicas_are_numbered_chief_first(job, index, replica):
    task = read_tf_config(config(job=job, index=index))
    assert task.replica_index == replica
    assert task.is_chief == (replica == 0)
    assert task.device == f"/job:{job}/replica:0/task:{index}"
    assert task.address == CLUSTER[job][index]


def test_jobs_need_not_be_named_as_in_a_whole_cluster():
    task = read_tf_config(config({"worker": ["b:1", "c:1"]}, "worker", 0))
    assert task.is_chief
    assert len(task.replicas) == 2
    evaluator = read_tf_config(config(job="evaluator"))
    assert (evaluator.replica_index, evaluator.address) == (None, None)
    assert read_tf_config(config({"master": ["a:1"]}, "master", 0)).job == "chief"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "TF_CONFIG is not set"),
        ("{", "is not JSON"),
        ('{"cluster": {"ps": "a:1"}}', "lists of 'host:port'"),
        (config(index=True), "task index must be 0 or more; got True"),
        (config({}), r"only the task \{'type': 'worker', .*: set TF_CONFIG's"),
        (config(None), "must map jobs to lists of 'host:port'; got None"),
        ('{"cluster": {"worker": ["a:1"]}}', "'task' must have 'type' and 'index'"),
        (config({"worker": ["a:1"], "boss": ["b:1"]}), "job 'boss' is unknown"),
        (config({"worker": ["a:1"], "ps": ["a:1"]}), "a:1 is given to worker 0 and ps"),
        (config({"worker": ["::1:22"]}), "worker 0 has '::1:22', which is not host"),
        (config({"ps": ["a:1"]}, "ps"), "neither a chief nor a worker"),
        (
            config({"chief": ["a:1", "b:1"]}, "chief"),
            "one chief is allowed; got 2",
        ),
    ],
)
def test_what_is_wrong_is_named(text, message, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match=message):
        read_tf_config(text)


def test_all_faults_are_named_at_once():
    cluster = {"worker": ["a:1", "a:1"], "boss": ["x"]}
    with pytest.raises(ValueError) as raised:
        read_tf_config(config(cluster, index=5))
    for part in ("a:1 is given to worker 0 and worker 1", "'boss'", "not host:port"):
        assert part in str(raised.value)


def test_the_environment_is_read_anew(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert find_tf_config() is None
    monkeypatch.setenv("TF_CONFIG", config(index=1))
    assert find_tf_config().index == 1
    monkeypatch.setenv("TF_CONFIG", "[]")  # is wrong, and not missing
    with pytest.raises(ValueError, match="a JSON object"):
        find_tf_config()


SPARSE = {"worker": {"1": "localhost:2223"}, "ps": []}
ONE_OF_SEVERAL = [
    {"task": {"type": "worker", "index": 1}},
    {"cluster": {}, "task": {"type": "worker", "index": 0}},
    {"sparseCluster": SPARSE, "task": {"type": "worker", "index": 1}},
    {"sparseCluster": SPARSE},
]


@pytest.mark.parametrize("told", ONE_OF_SEVERAL)
def test_a_task_without_a_cluster_is_refused(told, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(told))
    with pytest.raises(ValueError) as refused:
        find_tf_config()
    said = str(refused.value)
    assert f"lists every task; got only the task {told.get('task')!r}: " in said
    sparse = "'sparseCluster' does not list the other workers; set enableDynamicWorker"
    assert (sparse in said) == ("sparseCluster" in told)


@pytest.mark.parametrize("told", ["{}", '{"cluster": null}', '{"environment": "a"}'])
def test_what_names_neither_task_nor_cluster_is_alone(told, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", told)
    assert find_tf_config() is None
