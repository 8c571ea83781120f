"""One rank, its uncompressed step and those with reducers that send less.

Gradients are normal random numbers, different in each tensor and rank. Ranks over a
slow link are in separate network namespaces, joined by a veth pair with limited bits
per second (needs root and ``tc``).
"""

import subprocess
from collections.abc import Callable
from typing import Any

from allreduce_rank import (
    FUNCTION,
    INT8,
    LOW_RANK,
    SAMPLED,
    SIGN,
    TOP,
    Work,
    apply_momentum,
)
from harness import links
from racing import answer, block_of

_END = "task"


def address_of(work: Work, rank: int, port: int) -> str:
    """Returns where a rank is."""
    return f"10.77.0.{2 + rank}:{port}" if work.mbit else f"localhost:{port}"


def tie(first: int, second: int) -> None:
    """Ties the namespaces of two processes."""
    ends = f"netns {first} type veth peer name {_END} netns {second}"
    subprocess.run(["ip", "link", "add", _END, *ends.split()], check=True)


def serve_compressed_rank(
    pipe: Any, address: str, rank: int, size: int, work: Work
) -> None:
    """Makes contenders, and runs blocks of steps, until the pipe closes."""
    if work.mbit:
        links.enter_namespace()
        pipe.send(("alone", None))
        pipe.recv()
        rate = f"rate {work.mbit}mbit burst 64kb latency 400ms"
        for command in (
            "ip link set lo up",
            f"ip addr add {address_of(work, rank, 0)[:-2]}/24 dev {_END}",
            f"ip link set {_END} up",
            f"tc qdisc add dev {_END} root tbf {rate}",
        ):
            subprocess.run(command.split(), check=True)
        pipe.send(("tied", None))
    import tw_ranks

    group = tw_ranks.join(address, rank=rank, size=size)

    def make(name: str) -> Any:
        step, read = _make(name, group, work)
        return block_of(step), read

    answer(pipe, make)


def _make(
    name: str, group: Any, work: Work
) -> tuple[Callable[[], Any], Callable[[], float]]:
    from functools import partial

    import tensorflow as tf

    import tw_ranks
    from tw_reduce import ReducerState
    from tw_reduce import compression as c

    reducers = {
        LOW_RANK: c.power_sgd(rank=4),
        INT8: c.error_feedback(c.int8()),
        TOP: c.error_feedback(c.top_k(0.01)),
        SAMPLED: c.error_feedback(c.top_k(0.01, sampled=True)),
        SIGN: c.error_feedback(c.sign()),
    }
    found = [tf.Variable(tf.ones(shape)) for shape in work.shapes]
    momenta = [tf.Variable(tf.zeros(shape)) for shape in work.shapes]
    noise = [
        tf.Variable(tf.random.stateless_normal(shape, [group.rank, n]))
        for n, shape in enumerate(work.shapes)
    ]
    add = partial(tw_ranks.sum_across, group=group)
    state = None if name == FUNCTION else ReducerState(reducers[name], [found], add=add)

    def step() -> None:
        # A gradient that needs the parameters.
        grads = [own + 1e-30 * v for own, v in zip(noise, found, strict=True)]
        if state is None:
            [means] = tw_ranks.mean_across([grads], group=group)
        else:
            [means] = state([[own / group.size for own in grads]])
        apply_momentum(found, momenta, means)

    def read() -> float:
        return float(sum(tf.reduce_sum(own) for own in found))

    return group.bounded(tf.function(step)), read
