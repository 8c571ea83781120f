"""Models whose gradients are given, for replicas that are threads."""

from types import SimpleNamespace

import tensorflow as tf
from harness.replica_threads import new_container, run_replicas, start_by_hand

from tw_syncrep import SyncReplicasOptimizer

v1 = tf.compat.v1


def sgd(rate=1.0):
    return v1.train.GradientDescentOptimizer(rate)


def vector(name="v", size=3, value=0.0, **settings):
    start = v1.constant_initializer(value)
    return v1.get_variable(name, [size], initializer=start, **settings)


def make(
    task,
    grads_of,
    *,
    inner=None,
    aggregate=2,
    tokens=-1,
    wait_timeout_s=30,
    weight_of=lambda replica: None,
    **options,
):
    """A model whose gradients are given; one variable a gradient.

    ``weight_of`` returns what a replica weighs.
    """
    options["wait_timeout_s"] = wait_timeout_s
    step = v1.train.get_or_create_global_step()
    pairs = grads_of(task.replica_index)
    opt = SyncReplicasOptimizer(inner or sgd(), aggregate, **options)
    weight = weight_of(task.replica_index)
    train = opt.apply_gradients(pairs, global_step=step, weight=weight)
    hook = opt.make_session_run_hook(task.is_chief, tokens)
    values = [v for v in v1.trainable_variables()]
    return SimpleNamespace(opt=opt, train=train, hooks=[hook], step=step, values=values)


def steps(count):
    def drive(replica, model, session):
        for _ in range(count):
            session.run(model.train)
        return session.run([model.step, model.values]), model.opt.status(session)

    return drive


def run(grads_of, *, count=1, replicas=2, **options):
    """Returns the global step, the values and the status after some steps."""
    results = run_replicas(
        replicas, lambda task: make(task, grads_of, **options), steps(count)
    )
    (step, values), status = results[0]
    return int(step), values, status


def missing_in(report):
    """Returns who was missing by the report that an error carried."""
    lines = report.splitlines()
    return [line.split(None, 1)[1] for line in lines if line.startswith("  missing ")]


class ByHand:
    """Replicas without hooks, which run what hooks run."""

    def __init__(self, replicas, build):
        container = new_container()
        self.models, self.sessions = zip(
            *(start_by_hand(r, build, container=container) for r in range(replicas)),
            strict=True,
        )

    def graph(self, replica):
        return self.models[replica].opt.sync_graph

    def do(self, what, replica, **fed):
        ops = self.graph(replica).ops
        feed = {getattr(ops, name): value for name, value in fed.items()}
        return self.sessions[replica].run(getattr(ops, what), feed)

    def session(self, replica):
        """Returns the number of the replica's session."""
        return self.sessions[replica].run(self.graph(replica).session)

    def status(self):
        return self.models[0].opt.status(self.sessions[0])

    def position(self):
        status = self.status()
        return status.round_number, status.incarnation
