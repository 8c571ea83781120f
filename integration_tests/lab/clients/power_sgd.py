"""PyTorch's PowerSGD hook and ours, each on two processes, with the same gradients.

DistributedDataParallel over gloo reduces given gradients, of matrices of several sizes,
a bias and a matrix too small to be compressed. Its first two steps are all-reduced, as
the hook requires. From then on ``power_sgd`` reduces the same gradients under
``tw-launch``, starting from the factors that the hook has drawn.

A later step starts from factors that PyTorch makes orthogonal again and we do not. They
span the same space, so the means differ by rounding, which adds up over the steps: a
second run, in float64, shows that there is no other difference.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness.processes import succeed

DEADLINE_S = 300
RANK, PLAIN = 4, 2
FIRST, ALL = {"float32": 2e-6, "float64": 1e-14}, {"float32": 1e-3, "float64": 1e-11}
SHAPES = ((60, 40), (33, 70), (128, 24), (41,), (5, 3))
THEIRS = """
import os
import sys
import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

plain, columns = map(int, sys.argv[1:])
rank = int(os.environ["TW_LOCAL_RANK"])
store = f"file://{os.path.abspath('store')}"
distributed.init_process_group("gloo", store, rank=rank, world_size=2)
given = np.load(f"gradients{rank}.npz")
steps, names = len(given["0"]), sorted(given)
starts, orthogonalize = {}, theirs._orthogonalize


def remember(matrices, *more):
    orthogonalize(matrices, *more)
    rows = matrices.shape[-2]
    starts.setdefault(rows, matrices.detach().reshape(rows, -1).numpy().copy())


theirs._orthogonalize = remember


class Given(nn.Module):
    def __init__(self):
        super().__init__()
        own = [nn.Parameter(torch.tensor(given[n][0])) for n in names]
        self.own = nn.ParameterList(own)

    def forward(self, step):
        pairs = zip(names, self.own)
        return sum((torch.tensor(given[n][step]) * own).sum() for n, own in pairs)


model = nn.parallel.DistributedDataParallel(Given())
state = theirs.PowerSGDState(
    None, matrix_approximation_rank=columns, start_powerSGD_iter=plain
)
model.register_comm_hook(state, theirs.powerSGD_hook)
means = {n: [] for n in names}
for step in range(steps):
    model.zero_grad()
    model(step).backward()
    for n, own in zip(names, model.module.own):
        means[n].append(own.grad.numpy().copy())
np.savez(f"theirs{rank}.npz", **means)
# Of a matrix the right factor, which has a row per column, is drawn.
drawn = {n: starts[given[n].shape[-1]] for n in names if given[n].shape[-1] in starts}
np.savez(f"starts{rank}.npz", **drawn)
distributed.barrier()
os._exit(0)  # Threads of the hook may still run, which would abort the process.
"""
OURS = """
import sys
from functools import partial
import numpy as np
import tensorflow as tf
import tw_ranks
from tw_reduce import ReducerState
from tw_reduce.compression import power_sgd

plain, columns = map(int, sys.argv[1:])
group = tw_ranks.join()
given, starts = np.load(f"gradients{group.rank}.npz"), np.load("starts0.npz")
names = sorted(given)


class Started:
    inner = power_sgd(rank=columns)

    def init(self, variables):
        states = self.inner.init(variables)
        assert [n for n, own in zip(names, states) if own != ()] == sorted(starts)
        return [
            own if own == () else {**own, "factor": tf.constant(starts[n])}
            for n, own in zip(names, states)
        ]

    def update(self, grads, states, add):
        return self.inner.update(grads, states, add)


weights = [[tf.Variable(given[n][0]) for n in names]]
add = partial(tw_ranks.sum_across, group=group)
state = ReducerState(Started(), weights, add=add)


@tf.function
def reduce(*grads):
    return state([[own / group.size for own in grads]])[0]


means = [reduce(*(given[n][step] for n in names))
         for step in range(plain, len(given["0"]))]
by_name = {n: [own[m].numpy() for own in means] for m, n in enumerate(names)}
np.savez(f"ours{group.rank}.npz", **by_name)
group.leave()
"""


def main() -> int:
    """Reduces by both, and compares every step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = PLAIN + parser.parse_args().steps
    for dtype in FIRST:
        with tempfile.TemporaryDirectory() as folder:
            apart = differences(Path(folder), steps, dtype)
        print(f"{dtype}: first step {apart[0]:.1e}, later {apart[1:].max():.1e}")
        assert apart[0] < FIRST[dtype]
        assert apart.max() < ALL[dtype]
    return 0


def differences(work: Path, steps: int, dtype: str) -> np.ndarray:
    """Returns the largest difference of each compressed step, relative to the means."""
    rng = np.random.default_rng(0)
    for rank in range(2):
        grads = {
            str(n): rng.normal(size=(steps, *shape)).astype(dtype)
            for n, shape in enumerate(SHAPES)
        }
        np.savez(work / f"gradients{rank}.npz", **grads)
    theirs = reduced(work, "theirs", THEIRS)
    ours = reduced(work, "ours", OURS)
    worst = np.zeros(steps - PLAIN)
    for n in theirs:
        got, wanted = ours[n], theirs[n][PLAIN:]
        apart = np.abs(got - wanted).reshape(len(got), -1).max(1)
        worst = np.maximum(worst, apart / np.abs(wanted).max())
    return worst


def reduced(work: Path, name: str, program: str) -> dict[str, np.ndarray]:
    """Runs a program on two ranks; returns what rank 0 has of each step."""
    (work / f"{name}.py").write_text(program)
    launcher = [sys.executable, "-m", "tw_launch", "--ps", "0", "--workers", "2", "--"]
    command = [*launcher, sys.executable, "-P", f"{name}.py", str(PLAIN), str(RANK)]
    succeed(command, cwd=work, deadline_s=DEADLINE_S)
    ranks = [dict(np.load(work / f"{name}{rank}.npz")) for rank in range(2)]
    for n, own in ranks[0].items():
        np.testing.assert_array_equal(own, ranks[1][n])
    return ranks[0]


if __name__ == "__main__":
    sys.exit(main())
