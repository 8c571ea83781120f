"""DeepXDE 1.15 on two processes of ``tw-launch --horovod``.

Its backend ``tensorflow.compat.v1`` supports Horovod's weak scaling: every rank draws
its own points, and an optimizer averages the gradients. It detects a launcher by
OMPI_COMM_WORLD_SIZE, and uses an mpi4py communicator to send rank 0's boundary points
to the others; the launcher provides both. Strong scaling is not tested.

The Poisson equation -u'' = pi^2 sin(pi x) on [-1, 1] with u = 0 at the ends is solved
by one process and two. Both must approximate sin(pi x), and both ranks must have the
same weights, though each drew its own points and initial weights.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness.processes import succeed

DEADLINE_S = 600
PROGRAM = """
import sys
import horovod.tensorflow as hvd
import deepxde as dde
import numpy as np
from deepxde.backend import tf

hvd.init()
rank, steps = hvd.rank(), int(sys.argv[1])
dde.config.set_random_seed(17 + rank)


def residual(x, u):
    return -dde.grad.hessian(u, x) - np.pi**2 * tf.sin(np.pi * x)


interval = dde.geometry.Interval(-1, 1)
ends = dde.icbc.DirichletBC(interval, lambda x: 0, lambda _, on: on)
data = dde.data.PDE(
    interval,
    residual,
    ends,
    16,
    2,
    train_distribution="pseudo",
    solution=lambda x: np.sin(np.pi * x),
    num_test=100,
)
net = dde.nn.FNN([1] + [20] * 3 + [1], "tanh", "Glorot uniform")
model = dde.Model(data, net)
model.compile("adam", lr=0.003, metrics=["l2 relative error"])
model.train(iterations=steps, display_every=steps)
points = np.linspace(-1, 1, 201)[:, None].astype("float32")
np.save(f"u{rank}.npy", model.predict(points))
"""


def main() -> int:
    """Solves it with one process and with two."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "solve.py").write_text(PROGRAM)
        [alone] = solve(work, options.steps, workers=1)
        both = solve(work, options.steps, workers=2)
    wanted = np.sin(np.pi * np.linspace(-1, 1, 201))[:, None]
    errors = [
        np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        for got in (alone, both[0])
    ]
    print(f"relative error: one process {errors[0]:.1e}, two {errors[1]:.1e}")
    np.testing.assert_array_equal(both[0], both[1])
    assert max(errors) < 0.02
    return 0


def solve(work: Path, steps: int, *, workers: int) -> list[np.ndarray]:
    """Runs the program, and returns every rank's solution."""
    program = [str(work / "solve.py"), str(steps)]
    env = {**os.environ, "DDE_BACKEND": "tensorflow.compat.v1"}
    command = [sys.executable, "-m", "tw_horovod", *program]
    if workers > 1:
        launcher = [sys.executable, "-m", "tw_launch", "--horovod"]
        command = [*launcher, "-np", str(workers), "--", sys.executable, "-P", *program]
    succeed(command, cwd=work, env=env, deadline_s=DEADLINE_S)
    return [np.load(work / f"u{rank}.npy") for rank in range(workers)]


if __name__ == "__main__":
    sys.exit(main())
