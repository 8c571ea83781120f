"""A rank on a host: RANK SIZE TIMEOUT_S STALL_S; adds whole numbers until an error.

It prints its steps, each step that took long, and the error that ended it.
"""

import os
import sys
import time

LONG_S = 1.5
START_S = 240.0


def main(rank: int, size: int, timeout_s: float, stall_s: float) -> None:
    """Joins, and checks the sum of every step."""
    import tensorflow as tf

    import tw_ranks

    group = tw_ranks.join(
        "node0:4000",
        rank=rank,
        size=size,
        timeout_s=timeout_s,
        stall_timeout_s=stall_s,
        start_timeout_s=START_S,
    )

    @group.bounded
    @tf.function
    def step(number: tf.Tensor) -> tf.Tensor:
        own = tf.fill([100_000], number * (rank + 1.0))
        [[added]] = tw_ranks.sum_across([[own]], group=group)
        return tf.stack([tf.reduce_min(added), tf.reduce_max(added)])

    number, began = 0, time.monotonic()
    try:
        while True:
            number, began = number + 1, time.monotonic()
            lowest, highest = step(tf.constant(float(number))).numpy()
            want = number * size * (size + 1) / 2
            assert lowest == highest == want, f"{lowest} to {highest}, not {want}"
            took_s = time.monotonic() - began
            if took_s > LONG_S:
                print(f"step {number} took {took_s:.1f} s")
            print(f"step {number}")
            time.sleep(0.05)
    except BaseException as error:
        took_s, kind = time.monotonic() - began, type(error).__name__
        missing = list(getattr(error, "missing", []))
        print(f"ENDED after {took_s:.1f} s: {kind} {missing} {error}")
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
