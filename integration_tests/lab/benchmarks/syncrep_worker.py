"""A parameter server and a worker: one graph and one session per contender.

They exist twice: with TensorFlow's servers, for TensorFlow's programs and those that
change only the import, and with those of ``tw_launch``. The same model also runs under
``MultiWorkerMirroredStrategy``, without server and session.
"""

import re
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from allreduce_rank import make_strategy
from racing import WAIT_S, answer, block_of

CHECKED_STEPS = 3
RATE = 0.5
PEER = "tensorflow"
SAME_SERVERS = "tensorflow, our servers"
IMPORT, PULLED, BFLOAT16 = "import alone", "pulled", "bfloat16"
FLAT = "flat"
PER_ROW = "pulled, by row"
BOUNDED, UNBOUNDED = "bounded", "unbounded"
ASYNCHRONOUS, MULTI_WORKER = "asynchronous", "multi-worker"
WHOLE = (PULLED, FLAT, BFLOAT16, PER_ROW, BOUNDED, UNBOUNDED)
"""Contenders that are built with all of the package: servers, getter, optimizer."""


PEERS = (PEER, SAME_SERVERS, ASYNCHRONOUS, MULTI_WORKER)


@dataclass(frozen=True)
class Work:
    """A model: dense variables of one size, or an embedding table."""

    name: str
    variables: int
    size: int
    targets: dict[str, float]  # contender -> times the peer's speed
    contenders: tuple[str, ...] = (IMPORT, PULLED, FLAT, *PEERS)
    rows: int = 0
    peer: str = PEER


_OF_1K = "variables of 1,024 floats"
WORKS = {
    "10": Work(f"10 {_OF_1K}", 10, 1024, {PULLED: 2.0}),
    "100": Work(f"100 {_OF_1K}", 100, 1024, {PULLED: 7.0, IMPORT: 2.3}),
    "400": Work(f"400 {_OF_1K}", 400, 1024, {PULLED: 10.0, IMPORT: 2.8}),
    "10k": Work("100 variables of 10,240 floats", 100, 10_240, {PULLED: 3.0}),
    "1m": Work(
        "10 variables of 1,048,576 floats",
        10,
        1 << 20,
        {PULLED: 0.95, BFLOAT16: 1.2},
        (IMPORT, PULLED, BFLOAT16, *PEERS),
    ),
    "sparse": Work(
        "embedding of 100,000 rows, 64 wide, batches of 1,024 rows",
        1,
        64,
        {PULLED: 1.1, PER_ROW: 1.1},
        (IMPORT, PULLED, PER_ROW, PEER, SAME_SERVERS, ASYNCHRONOUS),
        rows=100_000,
    ),
    "bounded": Work(
        f"bounded waits, 10 {_OF_1K}",
        10,
        1024,
        {BOUNDED: 0.97},
        (UNBOUNDED, BOUNDED),
        peer=UNBOUNDED,
    ),
}


def checked_value(work: Work, name: str) -> float:
    """What parameters that start as 1 are after the checked steps, in the mean.

    The workers' gradients are 1 and 2. A table's rows are drawn by one worker each,
    so that a mean by row leaves them as they are, and one over replicas halves them.
    """
    by_row = bool(work.rows) and name in (PEER, SAME_SERVERS, PER_ROW)
    return 1 - RATE * CHECKED_STEPS * (3.0 if by_row else 1.5)


_POLL_S = 0.02
BATCH = 1024
"""Rows of the table that a worker draws a step."""


def has_our_servers(name: str) -> bool:
    """Tells in which of the two clusters a contender runs."""
    return name in (*WHOLE, SAME_SERVERS)


def serve(pipe: Any, cluster: Any, job: str, index: int, ours: bool) -> None:
    """The parameter server."""
    server = _task(cluster, job, index, ours=ours)
    pipe.send("serving")
    server.join()


def train(pipe: Any, cluster: Any, index: int, work: Work, ours: bool) -> None:
    """A worker with one session a contender."""
    server = _task(cluster, "worker", index, ours=ours)

    def make(name: str) -> Any:
        made = Trained(server.target, cluster, index, work, name)
        return made.run, made.read

    answer(pipe, make, block_of=lambda run: run)


def mirror(pipe: Any, cluster: Any, index: int, work: Work) -> None:
    """A worker of MultiWorkerMirroredStrategy, which has no parameter server."""
    strategy = make_strategy(cluster["worker"], index)
    import tensorflow as tf

    with strategy.scope():
        found = [tf.Variable(tf.ones([work.size])) for _ in range(work.variables)]

    def step() -> None:
        context = tf.distribute.get_replica_context()
        grads = [index + 1.0 + 2e-30 * tf.identity(v) for v in found]
        sums = context.all_reduce(tf.distribute.ReduceOp.MEAN, grads)
        for variable, mean in zip(found, sums, strict=True):
            variable.assign_sub(RATE * mean)

    @tf.function
    def train_step() -> None:
        strategy.run(step)

    answer(pipe, lambda _: (train_step, found[0].numpy))


@dataclass(frozen=True)
class Tokens:
    """Ops on the queue from which TensorFlow's replicas take a token a step."""

    put_back: Any  # puts one in, of the step that the variables are at
    take: Any  # takes one, whose step the replica's next gradients are for


class Trained:
    """One contender's session in one worker.

    Attributes:
      session: a monitored one.
      tokens: of TensorFlow's optimizer; None for the others.
      expected: the global step after the steps that were run.
    """

    def __init__(
        self, target: str, cluster: Any, index: int, work: Work, name: str
    ) -> None:
        import tensorflow as tf

        import tw_syncrep
        from tw_core.flat_variables import FlatVariables, pack_gradients

        v1 = tf.compat.v1
        device = f"/job:worker/task:{index}"
        with (
            tf.Graph().as_default() as graph,
            graph.container(re.sub("[^a-z0-9]+", "-", name)),
        ):
            setter = v1.train.replica_device_setter(
                cluster=hosts(cluster), worker_device=device
            )
            whole = name in WHOLE and name != FLAT
            getter = tw_syncrep.variable_getter(device) if whole else None
            with v1.device(setter):
                step = v1.train.get_or_create_global_step()
                with (
                    v1.variable_scope("model", custom_getter=getter),
                    FlatVariables().scope() if name == FLAT else nullcontext(),
                ):
                    loss = self._loss(work, index)
                optimizer = self._optimizer(name)
                pairs = pack_gradients(optimizer.compute_gradients(loss))
                self._train = optimizer.apply_gradients(pairs, global_step=step)
            self.tokens = None
            if name in (PEER, SAME_SERVERS):
                self.tokens = _tokens(optimizer, step)
            self._checked = _mean_parameter(v1.trainable_variables()[0], work)
            hooks = []
            if name != ASYNCHRONOUS:
                tokens = (0,) if name in (PEER, SAME_SERVERS) else ()
                hooks = [optimizer.make_session_run_hook(index == 0, *tokens)]
            make = v1.train.MonitoredTrainingSession
            if name not in (PEER, SAME_SERVERS, UNBOUNDED, ASYNCHRONOUS):
                make = tw_syncrep.training_session
            config = v1.ConfigProto(device_filters=["/job:ps", device])
            settings = {"config": config, "log_step_count_steps": None}
            self.session = make(target, index == 0, hooks=hooks, **settings)
            self._block = block_of(lambda: self.session.run(self._train))
            self._name, self._step, self.expected = name, step, 0

    def run(self, steps: int) -> float:
        seconds = self._block(steps)
        self.expected += steps
        if self._name != ASYNCHRONOUS:
            if self.tokens is not None and self.reached() < self.expected:
                self._let_the_other_end()
            if (reached := self.reached()) != self.expected:
                raise RuntimeError(f"{self._name}: step {reached}, not {self.expected}")
        return seconds

    def reached(self) -> int:
        """Returns the global step."""
        return int(self.session.run(self._step))

    def _let_the_other_end(self) -> None:
        """Exchanges a token that was the other replica's for one of the last step.

        TensorFlow's replicas take tokens from one queue. One that is back before the
        other has taken its token gets that too, and stays a step ahead: it has run all
        its steps before the last one is made, which needs the other, which waits for
        its token.
        """
        self.session.run(self.tokens.put_back)
        until = time.monotonic() + WAIT_S
        while self.reached() < self.expected and time.monotonic() < until:
            time.sleep(_POLL_S)
        self.session.run(self.tokens.take)

    def read(self) -> Any:
        return self.session.run(self._checked)

    def _loss(self, work: Work, index: int) -> Any:
        import tensorflow as tf

        v1 = tf.compat.v1
        ones = v1.ones_initializer()
        if work.rows:
            table = v1.get_variable("table", [work.rows, work.size], initializer=ones)
            rows = tf.gather(table, _drawn_rows(work.rows, index))
            return tf.reduce_sum(rows * (index + 1.0))
        found = [
            v1.get_variable(f"v{n}", [work.size], initializer=ones)
            for n in range(work.variables)
        ]
        # A gradient that needs the parameters, so that they must be pulled.
        factor = index + 1.0
        products = [
            tf.reduce_sum(factor * v + 1e-30 * v * v) for v in map(tf.identity, found)
        ]
        return tf.add_n(products)

    def _optimizer(self, name: str) -> Any:
        import tensorflow as tf

        from tw_syncrep import SyncReplicasOptimizer

        v1 = tf.compat.v1
        inner = v1.train.GradientDescentOptimizer(RATE)
        if name == ASYNCHRONOUS:
            return inner
        if name in (PEER, SAME_SERVERS):
            return v1.train.SyncReplicasOptimizer(inner, 2)
        return SyncReplicasOptimizer(
            inner,
            2,
            compression=tf.bfloat16 if name == BFLOAT16 else None,
            wait_timeout_s=None if name == UNBOUNDED else WAIT_S,
            sparse_mean="per_row" if name == PER_ROW else "replicas",
        )


def hosts(cluster: dict[str, list[int]]) -> dict[str, list[str]]:
    """Returns addresses by job for ports by job."""
    return {job: [f"localhost:{p}" for p in ports] for job, ports in cluster.items()}


def _tokens(optimizer: Any, step: Any) -> Tokens:
    import tensorflow as tf

    queue = optimizer._sync_token_queue
    with tf.device(queue.queue_ref.device):
        put_back, taken = queue.enqueue(step), queue.dequeue()
    return Tokens(put_back, optimizer._local_step.assign(taken))


def _drawn_rows(rows: int, index: int) -> Any:
    """Draws distinct rows from all over the table, and from this worker's half."""
    import tensorflow as tf

    half = rows // 2
    start = tf.random.uniform([], maxval=half, dtype=tf.int64)
    steps = tf.range(BATCH, dtype=tf.int64) * (half // BATCH)
    return (start + steps) % half * 2 + index


def _mean_parameter(first: Any, work: Work) -> Any:
    """Returns what every parameter is after the same steps; of a table, in the mean.

    However the rows were drawn, they move by the same in all.
    """
    import tensorflow as tf

    if not work.rows:
        return tf.identity(first)
    return 1 - tf.reduce_sum(1 - first) / (BATCH * work.size)


def _task(cluster: dict[str, list[int]], job: str, index: int, *, ours: bool) -> Any:
    """Starts a server as users of the package do, or of TensorFlow."""
    import tensorflow as tf

    import tw_launch

    if not ours:
        return tf.distribute.Server(hosts(cluster), job_name=job, task_index=index)
    warnings.simplefilter("ignore")
    addresses = {job: tuple(listed) for job, listed in hosts(cluster).items()}
    return tw_launch.start_server(tw_launch.TaskConfig(addresses, job, index))
