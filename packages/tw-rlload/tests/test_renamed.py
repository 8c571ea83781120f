"""Old names work for this version, and warn at the line that uses them."""

import numpy as np
import pytest
import rlload_pulled
import tensorflow as tf
from rlload_pulled import X, make, session

from tw_core import towers
from tw_core.testing import CPUS
from tw_rlload import DeviceBatch, plan_load

SPECS = {"x": tf.TensorSpec([None, 2])}
CUT = {"num_devices": 2, "max_per_device_batch_size": 4}


def batch(**options):
    made = towers(list(CPUS[:2]))
    return DeviceBatch(made, SPECS, max_per_device_batch_size=4, **options)


def waited(**options):
    loaded = batch(num_buffers=2)
    loaded.load_next([X])
    return loaded.use_next(**options).rows_loaded


def in_session(**options):
    with tf.Graph().as_default():
        optimizer = make(**options)
        with session() as sess:
            return optimizer.load_data(sess, [X[:9]], [])


def waited_in_session(**options):
    with tf.Graph().as_default():
        optimizer = make(num_buffers=2)
        with session() as sess:
            optimizer.load_next(sess, [X], [])
            return optimizer.use_next(**options)


def resident(**options):
    return batch(**options).load([X]).bytes_resident


# What is called, the old argument and the new one, with a value that shows.
ARGUMENTS = [
    ("plan_load", lambda **o: plan_load(9, **CUT, **o), "tail", "remainder", "pad"),
    ("DeviceBatch", lambda **o: batch(**o).load([X[:9]]), "tail", "remainder", "pad"),
    ("DeviceBatch", resident, "stacks", "num_buffers", 2),
    ("DeviceBatch.use_next", waited, "timeout_seconds", "timeout_s", 30.0),
    ("LocalSyncParallelOptimizer", in_session, "tail", "remainder", "drop"),
    ("LocalSyncParallelOptimizer", in_session, "stacks", "num_buffers", 2),
    (
        "LocalSyncParallelOptimizer.use_next",
        *(waited_in_session, "timeout_seconds", "timeout_s", 30.0),
    ),
]


@pytest.mark.parametrize(
    ("name", "call", "old", "new", "value"),
    ARGUMENTS,
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_an_old_argument_does_what_the_new_one_does(name, call, old, new, value):
    message = rf"{name}\({old}=...\) is deprecated .* use {name}\({new}=...\)"
    with pytest.warns(DeprecationWarning, match=message) as warned:
        got = call(**{old: value})
    assert got == call(**{new: value})
    assert {warning.filename for warning in warned} <= {
        __file__,
        rlload_pulled.__file__,
    }


def test_a_plan_answers_the_old_attribute():
    plan = plan_load(9, **CUT, remainder="pad")
    with pytest.warns(DeprecationWarning, match=r"LoadPlan.tail .* LoadPlan.remainder"):
        assert plan.tail == "pad"


def test_both_names_at_once_are_refused():
    with pytest.warns(DeprecationWarning), pytest.raises(TypeError, match="got both"):
        plan_load(np.int64(9), **CUT, tail="pad", remainder="pad")
