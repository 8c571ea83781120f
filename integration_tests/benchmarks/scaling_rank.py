"""One process of the benchmark ``scaling``: steps that reduce, and steps that do not.

All processes begin a block together, so that those that do not reduce share the cores
as those do that reduce. Each writes its times as JSON, into a file named by its rank.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import tw_ranks

group = tw_ranks.join()  # from TF_CONFIG; before anything makes a tensor

import tensorflow as tf  # noqa: E402

from tw_doctor._machine.scaling import CPU_SIZE, training_step  # noqa: E402

folder, blocks, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
reduce = partial(tw_ranks.mean_across, group=group)
contenders = {
    "reducing": training_step(["/cpu:0"], CPU_SIZE, reduce),
    "alone": training_step(["/cpu:0"], CPU_SIZE, None),
}
together = group.bounded(
    tf.function(lambda: tw_ranks.mean_across([[tf.ones([])]], group=group))
)
times: dict[str, list[float]] = {name: [] for name in contenders}
for step in contenders.values():
    step()
for _ in range(blocks):
    for name, step in contenders.items():
        step()
        together()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        times[name].append((time.perf_counter() - began) / steps)
(folder / f"{group.rank}.json").write_text(json.dumps(times))
together()
group.leave()
