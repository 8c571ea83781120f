"""The time of a step by kernel, in TensorFlow's own trace.

An epoch in one call is compared with a fed step, which is only the model. Tracing slows
calls down, but hardly the kernels, so only kernels are reported: the sums of their
times, although some run concurrently on several cores.
"""

from collections import Counter
from typing import Any

import tensorflow as tf
from rlload_contenders import Session
from rlload_works import MINIBATCHES, WORKS

OPTIONS = {
    "works": {
        "choices": "rlload_works.WORKS",
        "nargs": "*",
        "default": ["vectors-mlp"],
    },
    "epochs": 20,
}

v1 = tf.compat.v1
WARM_UP = 3


class TracedSession:
    """A session that adds up how long each kind of kernel takes."""

    def __init__(self, sess: tf.compat.v1.Session) -> None:
        self.sess, self.warm_up = sess, WARM_UP
        self.nanoseconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def run(self, fetches: Any, feeds: Any = None) -> Any:
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
        metadata = v1.RunMetadata()
        fetched = self.sess.run(fetches, feeds, options, metadata)
        self.warm_up -= 1
        if self.warm_up < 0:
            for device in metadata.step_stats.dev_stats:
                for node in device.node_stats:
                    self.add(node)
        return fetched

    def add(self, node: Any) -> None:
        kind = node.timeline_label.partition(" = ")[2].partition("(")[0]
        taken = node.op_end_rel_nanos - node.op_start_rel_nanos
        self.nanoseconds[kind or node.node_name] += taken
        self.calls[kind or node.node_name] += 1


def trace(name: str, epochs: int) -> tuple[TracedSession, TracedSession]:
    """Traces whole epochs, and as many fed steps as one of them has."""
    session = Session(WORKS[name])
    session.load()
    plain, looped = session.sess, TracedSession(session.sess)
    for _ in range(WARM_UP + epochs):
        session.optimizer.run_epochs(looped, 1)
    fed = TracedSession(plain)
    session.sess = fed
    fed.warm_up = WARM_UP * MINIBATCHES
    for _ in range(WARM_UP + epochs):
        session.feed()
    return looped, fed


def show(name: str, looped: TracedSession, fed: TracedSession, epochs: int) -> None:
    """Prints microseconds a step, the longest kinds first."""
    steps = 1e3 * epochs * MINIBATCHES
    sums = [one.nanoseconds.total() / steps for one in (looped, fed)]
    print(f"\n{WORKS[name].name}: kernels, microseconds per step")
    print(f"  {'':28}{'in an epoch':>12}{'fed':>12}{'times':>8}")
    for kind, taken in looped.nanoseconds.most_common(14):
        times = looped.calls[kind] / (epochs * MINIBATCHES)
        pair = (taken / steps, fed.nanoseconds[kind] / steps)
        print(f"  {kind:28}{pair[0]:12.1f}{pair[1]:12.1f}{times:8.1f}")
    print(f"  {'all':28}{sums[0]:12.1f}{sums[1]:12.1f}")


def main(options: Any, _: object) -> None:
    """Runs the profile."""
    for name in options.works:
        show(name, *trace(name, options.epochs), options.epochs)
