"""The builders of session graphs, made as most tests make them, and a session."""

from functools import partial

import tensorflow as tf

from tw_builders import (
    AsyncMultiGPUBuilder,
    SyncMultiGPUParameterServerBuilder,
    SyncMultiGPUReplicatedBuilder,
    SyncMultiGPUShardedBuilder,
)
from tw_core.testing import CPUS

v1 = tf.compat.v1
SYNCHRONOUS = {
    "parameter server": partial(SyncMultiGPUParameterServerBuilder, ps_device="cpu"),
    "spread server": partial(SyncMultiGPUParameterServerBuilder, ps_device="gpu"),
    "replicated": partial(SyncMultiGPUReplicatedBuilder, average=True, mode="cpu"),
    "sharded": partial(SyncMultiGPUShardedBuilder, average=True),
}
BUILDERS = SYNCHRONOUS | {"asynchronous": AsyncMultiGPUBuilder}
# Asynchronous training by several towers gives other results each time.
REPEATABLE = SYNCHRONOUS | {
    "asynchronous": lambda devices: AsyncMultiGPUBuilder(devices[:1])
}


def build(builder, tower_fn, get_opt_fn, **options):
    """Returns the towers' pairs, the op of a step, and the sync op or None."""
    grads = builder.call_for_each_tower(tower_fn)
    built = builder.build(grads, get_opt_fn, **options)
    return grads, *(built if isinstance(built, tuple) else (built, None))


def pairs_of(loss, variables):
    """Returns the pairs that a tower function returns."""
    return list(zip(tf.gradients(loss, variables), variables, strict=True))


def initialise(session):
    """Gives all variables their initial values."""
    session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])


def new_session():
    """Returns a session of all devices; variables have their initial values."""
    session = v1.Session(config=v1.ConfigProto(device_count={"CPU": len(CPUS)}))
    initialise(session)
    return session
