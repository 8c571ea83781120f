"""Old names still work in this version, and warn."""

import contextlib
import dataclasses

import pytest
import tensorflow as tf

from tw_syncrep import Status, SyncReplicasOptimizer, cluster

v1 = tf.compat.v1
DEVICE = "/job:worker/task:0"
STATUS = Status(*range(len(dataclasses.fields(Status))))


def copies_under(scope):
    with scope:
        v1.get_variable("v", [2])
    return [cached.copy.name for cached in cluster.cached_parameters()]


def getter_scope(**arguments):
    getter = cluster.variable_getter(DEVICE, **arguments)
    return v1.variable_scope("m", custom_getter=getter)


def optimizer(**arguments):
    inner = v1.train.GradientDescentOptimizer(1.0)
    return SyncReplicasOptimizer(inner, 1, **arguments)


RENAMED = {
    "cluster.mirrors": (
        lambda: cluster.mirrors is cluster.cached_parameters,
        "use tw_syncrep.cluster.cached_parameters",
    ),
    "Status.epoch": (lambda: STATUS.epoch == 2, "use Status.incarnation"),
    "variable_getter(below=...)": (
        lambda: copies_under(getter_scope(below=0)) == [],
        r"use variable_getter\(below_bytes=...\)",
    ),
    "pulled_together(below=...)": (
        lambda: copies_under(cluster.pulled_together(DEVICE, below=0)) == [],
        r"use pulled_together\(below_bytes=...\)",
    ),
    "SyncReplicasOptimizer(fuse_below=...)": (
        lambda: optimizer(fuse_below=5)._options.below_bytes == 5,
        r"use SyncReplicasOptimizer\(fuse_below_bytes=...\)",
    ),
}


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_name_works_and_warns(name):
    works, use = RENAMED[name]
    with tf.Graph().as_default(), pytest.warns(DeprecationWarning, match=use) as caught:
        assert works()
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    "call",
    [
        lambda **both: cluster.variable_getter(DEVICE, **both),
        lambda **both: contextlib.ExitStack().enter_context(
            cluster.pulled_together(DEVICE, **both)
        ),
    ],
)
def test_an_old_argument_is_not_mixed_with_its_new_name(call):
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(TypeError, match="got both below_bytes and below"),
    ):
        call(below=1, below_bytes=1)
