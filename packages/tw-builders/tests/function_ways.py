"""Three ways to apply gradients of towers in a ``tf.function``, and to train."""

from functools import partial

import tensorflow as tf

from tw_builders import (
    apply_gradients,
    apply_sharded_gradients,
    apply_shared_gradients,
    make_optimizers,
    make_sharded_optimizer,
)
from tw_core import LeastLoadedDeviceSetter, map_towers, replicate, towers
from tw_core.testing import CPUS
from tw_reduce import broadcast, mean, packed, sum_balanced


def make_apply(way, ours, get_opt_fn, replicas, reducer):
    """Returns a function of [K][N] gradients, and the optimizers that are saved.

    ``way``: ``"replicated"``, ``"sharded"`` or ``"shared"``, which has one replica.
    """
    if way == "sharded":
        optimizer, saved = make_sharded_optimizer(ours, get_opt_fn, replicas)
        return (
            lambda grads: apply_sharded_gradients(ours, grads, replicas, optimizer),
            [saved],
        )
    optimizers = make_optimizers(ours[: len(replicas)], get_opt_fn, replicas)
    if way == "replicated":
        return (
            lambda grads: apply_gradients(ours, reducer(grads), replicas, optimizers),
            optimizers,
        )
    [model] = replicas
    variables = getattr(model, "trainable_variables", model)

    def apply_shared(grads):
        pairs = [list(zip(own, variables, strict=True)) for own in grads]
        apply_shared_gradients(pairs, optimizers[0])

    return apply_shared, optimizers


def train(way, num_towers, make_model, get_opt_fn, batches, loss_of):
    """Trains models by ``loss_of(model, *parts)`` in a function, which it traces once.

    Returns the mean loss of each step, the replicas, and their optimizers.
    """
    devices = CPUS[:num_towers]
    ours = towers(devices)
    if way == "shared":
        setter = LeastLoadedDeviceSetter(CPUS[0], devices)
        with tf.variable_creator_scope(setter.create):
            replicas = [make_model()]
    else:
        replicas = replicate(ours, lambda tower: make_model())
    reducer = mean(packed(broadcast(partial(sum_balanced, devices=devices))))
    apply, optimizers = make_apply(way, ours, get_opt_fn, replicas, reducer)

    def tower_step(tower, model, *parts):
        with tf.GradientTape() as tape:
            loss = loss_of(model, *parts)
        return loss, tape.gradient(loss, model.trainable_variables)

    @tf.function(autograph=False)
    def step(*batch):
        models = replicas * (num_towers if way == "shared" else 1)
        parts = [tf.split(own, num_towers) for own in batch]
        results = map_towers(tower_step, ours, models, *parts)
        losses, grads = zip(*results, strict=True)
        apply(grads)
        return tf.add_n(losses) / num_towers

    losses = [float(step(*batch)) for batch in batches]
    assert step.experimental_get_tracing_count() == 1
    return losses, replicas, optimizers
