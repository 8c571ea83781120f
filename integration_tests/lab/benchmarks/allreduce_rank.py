"""One rank, its works, TensorFlow's strategy and our contenders in one process."""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from racing import answer

PEER, FUNCTION, SESSION = "multi-worker", "tf.function", "local session"
BFLOAT16, SERVER, DDP, FLAT = "bfloat16", "parameter server", "DDP", "flat"
MPI, MPI_SESSION = "MPI", "MPI, local session"
LOW_RANK, INT8, SIGN = "rank 4", "int8", "sign"
TOP, SAMPLED = "top 1 %", "top 1 %, sampled"
DDP_ALONE = "DDP, backward pass alone"
BACKWARD, EXCHANGE = "backward pass alone", "exchange alone"
OWN_STEP, FIT, SHARDED_FIT = "own step", "fit", "fit, sharded"
RATE, MOMENTUM = 0.01, 0.9
CHECKED_STEPS = 3


ALL = (FUNCTION, FLAT, SESSION, PEER, SERVER, DDP, MPI, MPI_SESSION)
COMPRESSED = (FUNCTION, LOW_RANK, INT8, TOP, SAMPLED, SIGN)
OVERLAPPED = (BACKWARD, EXCHANGE, OWN_STEP, FIT, SHARDED_FIT)
OF_NETWORKS = (BACKWARD, EXCHANGE, OWN_STEP, FIT, DDP, DDP_ALONE)
# Contender and whom it is measured against -> the most that it may take of that one's
# time, where a work does not say otherwise.
AT_MOST = {
    (FUNCTION, PEER): 0.8,
    (SESSION, PEER): 0.9,
    (FUNCTION, DDP): 0.8,
    (FUNCTION, SERVER): 0.6,
    (MPI, PEER): 0.6,
    (MPI_SESSION, MPI): 1.15,
}


@dataclass(frozen=True)
class Work:
    """A model of which nothing but parameters counts."""

    name: str  # as shown
    shapes: tuple[tuple[int, ...], ...]  # of the variables
    # As in ``AT_MOST``, of those that take part
    targets: dict[tuple[str, str], float]
    contenders: tuple[str, ...] = ALL  # who takes part
    mbit: int = 0  # of the link between two ranks, each a host; 0 for one machine
    program: str = ""  # makes and runs contenders of ours alone
    network: str = ""  # of ``overlap_networks``, instead of shapes
    rows: int = 4  # of a rank's batch


def _of_network(network: str, mbit: int, *, rows: int) -> Work:
    return Work(
        f"{network} network of 20 million parameters, {mbit} Mbit/s",
        (),
        {},
        OF_NETWORKS,
        mbit=mbit,
        program="overlap_rank",
        network=network,
        rows=rows,
    )


_LARGE = ((1024, 1024),) * 10
_MLP = tuple(shape for _ in range(6) for shape in ((512, 512), (512,)))
_SMALL = tuple((16, 16) if n % 2 else (16,) for n in range(25))
WORKS = {
    "10": Work(
        "10 variables of 1,024 floats", ((1024,),) * 10, {(FUNCTION, DDP): 0.65}
    ),
    "100": Work(
        "100 variables of 1,024 floats",
        ((1024,),) * 100,
        {(FUNCTION, DDP): 0.45, (MPI, DDP): 0.3},
    ),
    "400": Work(
        "400 variables of 1,024 floats",
        ((1024,),) * 400,
        {(FUNCTION, PEER): 0.75, (FUNCTION, DDP): 0.6},
        (FUNCTION, FLAT, SESSION, PEER, DDP, MPI, MPI_SESSION),
    ),
    "1m": Work(
        "10 variables of 1,048,576 floats",
        ((1 << 20,),) * 10,
        {
            (FUNCTION, PEER): 1.0,
            (BFLOAT16, PEER): 0.65,
            (SESSION, PEER): 1.2,
            (FUNCTION, DDP): 1.6,
            (MPI, PEER): 0.45,
            (MPI, DDP): 0.45,
        },
        (FUNCTION, BFLOAT16, SESSION, PEER, DDP, MPI, MPI_SESSION),
    ),
    "compressed": Work(
        "10 matrices of 1,048,576 floats",
        _LARGE,
        {(LOW_RANK, FUNCTION): 0.6, (INT8, FUNCTION): 0.6},
        COMPRESSED,
        program="compressed_rank",
    ),
    "slow-link": Work(
        "10 matrices of 1,048,576 floats, 100 Mbit/s",
        _LARGE,
        {
            (LOW_RANK, FUNCTION): 0.05,
            (TOP, FUNCTION): 0.1,
            (SAMPLED, FUNCTION): 0.1,
            (INT8, FUNCTION): 0.35,
        },
        COMPRESSED,
        mbit=100,
        program="compressed_rank",
    ),
    "overlap-8": Work(
        "backward pass of 2 s, 8 variables of 1,048,576 floats, 200 Mbit/s",
        ((1 << 20,),) * 8,
        {(OWN_STEP, BACKWARD): 1.15, (FIT, BACKWARD): 1.15},
        OVERLAPPED,
        mbit=200,
        program="overlap_rank",
    ),
    "overlap-64": Work(
        "backward pass of 2 s, 64 variables of 131,072 floats, 200 Mbit/s",
        ((1 << 17,),) * 64,
        {(OWN_STEP, BACKWARD): 1.15, (FIT, BACKWARD): 1.15},
        OVERLAPPED,
        mbit=200,
        program="overlap_rank",
    ),
    "convolutional-100": _of_network("convolutional", 100, rows=32),
    "convolutional-1000": _of_network("convolutional", 1000, rows=4),
    "transformer-100": _of_network("transformer", 100, rows=32),
    "transformer-1000": _of_network("transformer", 1000, rows=4),
    "mlp": Work(
        "MLP 6 x 512", _MLP, {(MPI, DDP): 0.6}, (FUNCTION, FLAT, PEER, DDP, MPI)
    ),
    "small": Work("25 small variables", _SMALL, {}, (FUNCTION, FLAT, PEER, DDP)),
}


def parameter_after(steps: int, size: int) -> float:
    """Returns what every parameter is, which begins at 1, after momentum steps.

    Rank r's gradient is r + 1 for every element.
    """
    mean = (size + 1) / 2
    parameter, momentum = 1.0, 0.0
    for _ in range(steps):
        momentum = MOMENTUM * momentum - RATE * mean
        parameter += momentum
    return parameter


def serve_rank(pipe: Any, ports: list[int], rank: int, work: Work) -> None:
    """Makes contenders, and runs blocks of steps, until the pipe closes."""
    strategy = make_strategy(ports, rank)
    # The group has a port of its own, beside that of TensorFlow's runtime.
    group = join_beside(rank, len(ports), ports[0] + 1)
    _serve(pipe, strategy, group, work)


def serve_mpi_rank(pipe: Any, variables: dict[str, str], rank: int, work: Work) -> None:
    """Does so as a rank of MPI."""
    os.environ.update(variables)
    import tw_ranks

    _serve(pipe, None, tw_ranks.join(engine="mpi"), work)


def _serve(pipe: Any, strategy: Any, group: Any, work: Work) -> None:
    def make(name: str) -> Any:
        if name in (SESSION, MPI_SESSION):
            return _make_session(group, group.rank, work)
        return _make_function(name, strategy, group, group.rank, work)

    answer(pipe, make)


def make_strategy(ports: list[int], rank: int) -> Any:
    """Makes TensorFlow's strategy for several processes, one at each port."""
    addresses = [f"localhost:{port}" for port in ports]
    task = {"type": "worker", "index": rank}
    config = {"cluster": {"worker": addresses}, "task": task}
    os.environ["TF_CONFIG"] = json.dumps(config)
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


def join_beside(rank: int, size: int, port: int) -> Any:
    """Joins where TensorFlow's runtime is part of a cluster already."""
    from unittest import mock

    import tw_ranks
    from tw_ranks import _tf_compat

    with (
        mock.patch.object(_tf_compat, "has_started", return_value=False),
        mock.patch.object(_tf_compat, "join_cluster"),
    ):
        return tw_ranks.join(f"localhost:{port}", rank=rank, size=size)


def apply_momentum(variables: Any, momenta: Any, grads: Any) -> None:
    """Updates variables as Keras's SGD does, without its bookkeeping."""
    import tensorflow as tf

    for variable, momentum, grad in zip(variables, momenta, grads, strict=True):
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=momentum.handle,
            lr=RATE,
            grad=grad,
            momentum=MOMENTUM,
        )


def _make_function(
    name: str, strategy: Any, group: Any, rank: int, work: Work
) -> tuple[Callable[[], Any], Callable[[], float]]:
    import tensorflow as tf

    import tw_ranks
    from tw_core.flat_variables import FlatVariables, pack_gradients

    flat = FlatVariables()
    scopes = {FLAT: flat.scope} | ({PEER: strategy.scope} if strategy else {})
    with scopes.get(name, nullcontext)():
        found = [tf.Variable(tf.ones(shape)) for shape in work.shapes]
    trained = found
    if name == FLAT:
        zeros = [(tf.zeros(v.shape), v) for v in found]
        trained = [v for _, v in pack_gradients(zeros)]
    with strategy.scope() if name == PEER else nullcontext():
        momenta = [tf.Variable(tf.zeros(v.shape)) for v in trained]

    def step() -> None:
        with flat.reading() if name == FLAT else nullcontext():
            # A gradient that needs the parameters.
            grads = [rank + 1.0 + 1e-30 * tf.identity(v) for v in found]
        pairs = list(zip(grads, found, strict=True))
        pairs = pack_gradients(pairs) if name == FLAT else pairs
        grads = [grad for grad, _ in pairs]
        if name == PEER:
            context = tf.distribute.get_replica_context()
            means = context.all_reduce(tf.distribute.ReduceOp.MEAN, grads)
        else:
            wire = "bfloat16" if name == BFLOAT16 else None
            [means] = tw_ranks.mean_across([grads], group=group, wire_dtype=wire)
        apply_momentum([variable for _, variable in pairs], momenta, means)

    def read() -> float:
        return float(found[-1].numpy().ravel()[-1])

    if name == PEER:
        return tf.function(lambda: strategy.run(step)), read
    return group.bounded(tf.function(step)), read


def _make_session(
    group: Any, rank: int, work: Work
) -> tuple[Callable[[], Any], Callable[[], float]]:
    import tensorflow as tf

    import tw_ranks

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        found = [
            v1.get_variable(f"v{n}", initializer=tf.ones(shape), use_resource=True)
            for n, shape in enumerate(work.shapes)
        ]
        grads = [rank + 1.0 + 1e-30 * v.read_value() for v in found]
        [means] = tw_ranks.mean_across([grads], group=group)
        optimizer = v1.train.MomentumOptimizer(RATE, MOMENTUM)
        train = optimizer.apply_gradients(zip(means, found, strict=True))
        last = found[-1].read_value()
        session = v1.Session()
        session.run(v1.global_variables_initializer())
    step = session.make_callable(train)
    return step, lambda: float(session.run(last).ravel()[-1])
