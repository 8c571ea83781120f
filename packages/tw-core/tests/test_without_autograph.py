"""AutoGraph converts users' tower functions and leaves the library alone."""

import tensorflow as tf

from tw_core import Replicated, TrainTowerContext, VariableStore, map_towers, towers
from tw_core.contexts import TowerFunc
from tw_core.internal import without_autograph
from tw_core.testing import CPUS


def absolute(tower, x):
    if tf.reduce_sum(x) < 0:
        return -x
    return x


def test_a_tower_function_may_branch_on_tensors():
    ours = towers(CPUS[:2])

    @tf.function
    def step(xs):
        return map_towers(absolute, ours, xs)

    got = step([tf.constant([-1.0, -2.0]), tf.constant([3.0, 4.0])])
    assert [x.numpy().tolist() for x in got] == [[1.0, 2.0], [3.0, 4.0]]


def test_a_tower_function_with_variables_of_its_own_may_branch_on_tensors():
    ours = towers(CPUS[:2])
    store = VariableStore(Replicated())

    def absolute_of_sum(x):
        w = tf.compat.v1.get_variable("w", initializer=[1.0, 1.0])
        return absolute(None, tf.reduce_sum(x * w))

    func = TowerFunc(absolute_of_sum, [tf.TensorSpec([2], name="x")])

    @tf.function
    def step(xs):
        sums = []
        for tower, x in zip(ours, xs, strict=True):
            with store.scope(tower), TrainTowerContext(tower.name, tower.name):
                sums.append(func(x))
        return sums

    got = step([tf.constant([-1.0, -2.0]), tf.constant([3.0, 4.0])])
    assert [float(x) for x in got] == [3.0, 7.0]
    assert [store.variables(t)[0].name for t in ours] == ["tower0/w:0", "tower1/w:0"]
    assert [h.ns_name for h in func.towers[-2:]] == ["tower0", "tower1"]


def test_a_marked_function_runs_as_it_is_written():
    seen = []

    @without_autograph
    def library(x):
        """Doubles."""
        seen.append(tf.__internal__.autograph.control_status_ctx().status.name)
        return x + x

    @tf.function
    def step(x):
        return library(x)

    assert step(tf.constant(2.0)).numpy() == 4.0
    assert seen == ["DISABLED"]
    assert library.__name__ == "library"
    assert library.__doc__ == "Doubles."
