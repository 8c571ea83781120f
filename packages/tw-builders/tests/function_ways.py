"""Three ways to apply gradients of towers in a ``tf.function``."""

from tw_builders import (
    apply_gradients,
    apply_sharded_gradients,
    apply_shared_gradients,
    make_optimizers,
    make_sharded_optimizer,
)


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
