"""The layout of ranks over machines: the one that wastes most, and what to do instead.

Known when all have joined, in plain Python. Ranks on CPUs are not warned of: their
gradients are in host memory anyway.
"""

from collections import Counter
from collections.abc import Sequence

from tw_ranks._engines.choice import Engine, EngineFacts


def find_layout_fault(
    engine: Engine, facts: EngineFacts, node_ranks: Sequence[int]
) -> str:
    """Returns what is wrong with GPUs' ranks, and what to do; "" if nothing is.

    ``node_ranks`` has the number of each rank's machine.

    >>> gpu, ring = EngineFacts(2, num_gpus=1), Engine("tensorflow", "it was asked for")
    >>> find_layout_fault(ring, gpu, [0, 0])[:68]
    '2 ranks with GPUs, 2 of them on one machine, add their gradients by '
    >>> find_layout_fault(ring, gpu, [0, 1])
    ''
    """
    most = max(Counter(node_ranks).values())
    if engine.name != "tensorflow" or not facts.num_gpus or most == 1:
        return ""
    instead = 'engine="nccl"' if facts.tensorflow_has_nccl else "a TensorFlow with NCCL"
    return (
        f"{facts.size} ranks with GPUs, {most} of them on one machine, add their "
        "gradients by TensorFlow's ring: each gradient passes through host memory and "
        f"gRPC even between GPUs of one machine, in {2 * (facts.size - 1)} messages, "
        "one after another. Start one process on each machine, with a tower for each "
        f"of its GPUs, or use {instead}; got the ring, as {engine.reason}"
    )
