"""Towers with flat variables: where these are, and what is refused.

That they are trained and saved as others are is tested in ``test_losses_of_towers``,
``test_checkpoint_pairs`` and ``test_function_models``.
"""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from session_builders import SYNCHRONOUS, new_session, pairs_of

from tw_builders import AsyncMultiGPUBuilder, SyncMultiGPUShardedBuilder
from tw_core import get_current_tower_context, placement, session_config
from tw_core.devices import canonical_device
from tw_core.flat_variables import flatten
from tw_core.testing import CPUS

v1 = tf.compat.v1
BELOW = 20_000
BUILDERS = {
    name: lambda devices, below, make=make, **group: make(
        devices, flat_below_bytes=below, **group
    )
    for name, make in SYNCHRONOUS.items()
}


def test_asynchronous_towers_have_flat_variables_too():
    with tf.Graph().as_default():
        builder = AsyncMultiGPUBuilder(CPUS[:2], flat_below_bytes=BELOW)
        grads = builder.call_for_each_tower(
            lambda: v1.train.GradientDescentOptimizer(1.0).compute_gradients(
                tf.reduce_sum(v1.get_variable("a", initializer=[3.0, 5.0]))
                + tf.reduce_sum(v1.get_variable("b", initializer=7.0))
            )
        )
        ops = builder.build_tower_ops(
            grads, partial(v1.train.GradientDescentOptimizer, 1.0)
        )
        with v1.Session(config=session_config(num_cpus=8)) as session:
            session.run(v1.global_variables_initializer())
            for op in ops:
                session.run(op)
            # Spread over the towers' devices, one flat variable on each.
            flats = [v for v in v1.global_variables() if "flat" in v.name]
            assert [session.run(v).tolist() for v in flats] == [[2.0, 4.0], [6.0]]


@pytest.mark.parametrize("retried_with", [BELOW, 0])
@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("failing_tower", [0, 1])
def test_a_flat_build_that_failed_is_not_taken_over(
    builder, failing_tower, retried_with
):
    def pairs(*, fails):
        w = v1.get_variable("w", [3])
        if fails and get_current_tower_context().index == failing_tower:
            raise ArithmeticError
        return [(tf.ones([3]), w)]

    with tf.Graph().as_default():
        with pytest.raises(ArithmeticError):
            BUILDERS[builder](CPUS[:2], BELOW).call_for_each_tower(
                partial(pairs, fails=True)
            )
        assert v1.global_variables() == v1.trainable_variables() == []
        retried = BUILDERS[builder](CPUS[:2], retried_with)
        with pytest.raises(ValueError, match="'w' was made by a build that failed"):
            retried.call_for_each_tower(partial(pairs, fails=False))


def test_a_variable_made_again_has_the_same_shape():
    with tf.Graph().as_default():
        builder = BUILDERS["parameter server"](CPUS[:2], BELOW)
        with pytest.raises(ValueError, match=r"share variable w, but .* \(4,\)"):
            builder.call_for_each_tower(
                lambda: v1.get_variable("w", [3 + get_current_tower_context().index])
            )


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    def model(size):
        made = tf.Module()
        made.b, made.w = tf.Variable(tf.ones([2])), tf.Variable(tf.ones([size]))
        return made

    def checkpoint(size):
        return tf.train.Checkpoint(flatten(partial(model, size)).model)

    path = checkpoint(3).write(str(tmp_path / "m"))
    with pytest.raises(ValueError, match=r"shape \(5,\); got .* \(3,\)"):
        checkpoint(5).read(path)


# Four of 256 KiB, which stay alone, and 32 small ones, which do not.
SIZES = [*[(256, 256)] * 4, *[(32, 32), (32,)] * 16]


def placed(builder, num_towers, below):
    """Device -> {variable: bytes}, and device -> KiB of reduced gradients, of Adam."""

    def pairs():
        own = [v1.get_variable(f"v{n}", size) for n, size in enumerate(SIZES)]
        return [(tf.ones(v.shape), v) for v in own]

    with tf.Graph().as_default() as graph:
        made = BUILDERS[builder](CPUS[:num_towers], below)
        made.build(made.call_for_each_tower(pairs), v1.train.AdamOptimizer)
        reduced = made.grads if builder == "replicated" else [made.grads]
        taken = Counter()
        for grad, variable in (pair for own in reduced for pair in own):
            size = grad.shape.num_elements() * grad.dtype.size
            taken[canonical_device(variable.device)] += size / 1024
        return placement(graph).variables, dict(sorted(taken.items()))


# docs/howto/builders.md has these figures.
REDUCED_KIB = {
    "replicated": {2: [1090] * 2, 4: [1090] * 4},
    "sharded": {2: [545] * 2, 4: [272.5] * 4},
    "flat sharded": {2: [578, 512], 4: [322, 256, 256, 256]},
    "spread server": {2: [545] * 2, 4: [272.75, 272.375, 272.375, 272.5]},
}


@pytest.mark.slow
@pytest.mark.parametrize("num_towers", [2, 4])
@pytest.mark.parametrize("builder", BUILDERS)
def test_flat_variables_are_counted_once_and_take_what_the_page_says(
    builder, num_towers
):
    (plain, taken), (flat, taken_flat) = (
        placed(builder, num_towers, below) for below in (0, BELOW)
    )
    if builder in REDUCED_KIB:
        want = REDUCED_KIB[builder]
        assert [*taken.values()] == want[num_towers]
        want = REDUCED_KIB.get(f"flat {builder}", want)
        assert [*taken_flat.values()] == want[num_towers]
    parts = [
        f"{prefix}v{n}{slot}"
        for prefix in ("", *(f"tower{k}/" for k in range(1, num_towers)))
        for n in range(4, len(SIZES))
        for slot in ("", "/Adam", "/Adam_1")
    ]
    names = {name for own in flat.values() for name in own}
    assert names.isdisjoint(parts)
    assert not any("incomplete" in name for name in names)
    totals = [sum(sum(own.values()) for own in p.values()) for p in (plain, flat)]
    assert totals[0] == totals[1]
    if builder == "sharded":
        replicated = sum(
            sum(own.values()) for own in placed("replicated", num_towers, 0)[0].values()
        )
        share = (num_towers + 2) / (3 * num_towers)
        assert totals[1] <= replicated * (share + 0.02)


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_group_leaves_variables_with_sparse_gradients_alone(builder):
    asked = []

    def group(name):
        asked.append(name)
        return None if name == "rows" else ""

    def pairs():
        rows = v1.get_variable("rows", initializer=np.ones([5, 2], np.float32))
        scale = v1.get_variable("scale", initializer=2.0)
        offset = v1.get_variable("offset", initializer=[0.0, 0.0])
        loss = tf.reduce_sum(tf.gather(rows, [1, 3, 3]) * scale + offset)
        return pairs_of(loss, [rows, scale, offset])

    with tf.Graph().as_default():
        made = BUILDERS[builder](CPUS[:2], BELOW, flat_group=group)
        grads = made.call_for_each_tower(pairs)
        made.build(grads, partial(v1.train.GradientDescentOptimizer, 1.0))
        reduced = made.grads[0] if isinstance(made.grads[0], list) else made.grads
        kinds = [type(grad) for grad, _ in reduced]
    assert kinds[0] is tf.IndexedSlices and tf.IndexedSlices not in kinds[1:]
    assert {*asked} == {"rows", "scale", "offset"}


class Doubling(v1.train.GradientDescentOptimizer):
    """Treats each element by itself, which only its class can say."""

    def _resource_apply_dense(self, grad, handle):
        return super()._resource_apply_dense(2.0 * grad, handle)


@pytest.mark.parametrize("builder", BUILDERS)
def test_ones_own_optimizer_is_refused_until_it_says_that_it_is_elementwise(builder):
    def pairs():
        made = [v1.get_variable(name, initializer=[3.0, 5.0]) for name in "ab"]
        return pairs_of(tf.reduce_sum(made[0] * made[1]), made)

    def trained(make, below):
        with tf.Graph().as_default():
            made = BUILDERS[builder](CPUS[:2], below)
            built = made.build(made.call_for_each_tower(pairs), make)
            train_op = built[0] if isinstance(built, tuple) else built
            session = new_session()
            session.run(train_op)
            return session.run(v1.trainable_variables()[:2])

    says = "Doubling is not known .*set elementwise = True in its class.*flat/float32"
    with pytest.raises(ValueError, match=says):
        trained(partial(Doubling, 0.1), BELOW)
    marked = type("Marked", (Doubling,), {"elementwise": True})
    np.testing.assert_allclose(
        trained(partial(marked, 0.1), BELOW), trained(partial(Doubling, 0.1), 0)
    )


def test_a_group_that_chooses_nothing_is_refused():
    with pytest.raises(ValueError, match="which is 0; give both"):
        SyncMultiGPUShardedBuilder(CPUS[:2], True, flat_group=lambda name: "")
