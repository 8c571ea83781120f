"""DeePMD-kit 3.2 on two processes of ``tw-launch --horovod``.

Its TensorFlow backend is a session-graph program with reference variables. A small
system of eight atoms, whose energies and forces are those of Lennard-Jones, is trained
from its own command line, with one process and two; then training resumes, and the
model is frozen, compressed and tested. With ``scale_by_worker: none`` two processes
train on twice the batch, so their loss must lie within the spread of one process on
twice the batch, over five seeds.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness.processes import succeed

ATOMS, CELL, SIGMA = 8, 6.0, 2.0
STEPS = 200
DEADLINE_S = 600


def main() -> int:
    """Runs the whole course; 0 where all held."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_system(work / "train", frames=80, seed=0)
        write_system(work / "valid", frames=20, seed=1)
        alone = [
            train(work / f"alone{seed}", work, options.steps, batch=2, seed=seed)
            for seed in range(1, options.seeds + 1)
        ]
        both = train(work / "both", work, options.steps, batch=1, seed=1, workers=2)
        low, high = min(alone), max(alone)
        margin = high - low
        print(f"one process, batch 2: {low:.3e} to {high:.3e}; two: {both:.3e}")
        assert low - margin <= both <= high + margin
        go_on(work / "both", work)
        print("Resumed on two processes; frozen, compressed and tested.")
    return 0


def write_system(folder: Path, *, frames: int, seed: int) -> None:
    """Writes frames of atoms in a periodic cell, in DeePMD-kit's format."""
    draw = np.random.default_rng(seed)
    corners = np.stack(np.meshgrid(*[[0.0, CELL / 2]] * 3), -1).reshape(-1, 3)
    coords = corners + draw.normal(0, 0.25, (frames, ATOMS, 3))
    energies, forces = zip(*map(lennard_jones, coords), strict=True)
    (folder / "set.000").mkdir(parents=True)
    (folder / "type.raw").write_text("\n".join(["0"] * ATOMS) + "\n")
    (folder / "type_map.raw").write_text("A\n")
    arrays = {
        "coord": coords.reshape(frames, -1),
        "box": np.tile((np.eye(3) * CELL).ravel(), (frames, 1)),
        "energy": np.array(energies),
        "force": np.array(forces).reshape(frames, -1),
    }
    for name, array in arrays.items():
        np.save(folder / "set.000" / f"{name}.npy", array)


def lennard_jones(coords: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns the energy and the forces [ATOMS, 3] in the periodic cell."""
    apart = coords[:, None] - coords[None]
    apart -= CELL * np.round(apart / CELL)
    square = np.sum(apart**2, -1) + np.eye(ATOMS)
    attraction = (SIGMA**2 / square) ** 3 * (1 - np.eye(ATOMS))
    energy = 2 * np.sum(attraction**2 - attraction)
    pull = 24 * (2 * attraction**2 - attraction) / square
    return float(energy), np.sum(pull[..., None] * apart, 1)


def train(
    folder: Path, work: Path, steps: int, *, batch: int, seed: int, workers: int = 1
) -> float:
    """Trains, and returns the loss on the validation frames."""
    folder.mkdir()
    (folder / "input.json").write_text(json.dumps(settings(work, steps, batch, seed)))
    run(["train", "input.json", "--skip-neighbor-stat"], folder, workers)
    return read_loss(folder, steps)


def read_loss(folder: Path, steps: int) -> float:
    """Reads the last validation loss of ``lcurve.out``."""
    rows = np.genfromtxt(folder / "lcurve.out", names=True)
    assert rows["step"][-1] == steps, rows["step"]
    return float(rows["rmse_val"][-1])


def settings(work: Path, steps: int, batch: int, seed: int) -> dict[str, Any]:
    """Returns a small model's input."""
    data = {"systems": [str(work / "train")], "batch_size": batch}
    return {
        "model": {
            "type_map": ["A"],
            "descriptor": {
                "type": "se_e2_a",
                "sel": [32],
                "rcut": 3.0,
                "rcut_smth": 0.5,
                "neuron": [8, 16],
                "axis_neuron": 4,
                "seed": seed,
            },
            "fitting_net": {"neuron": [16, 16], "seed": seed},
        },
        "learning_rate": {
            "type": "exp",
            "start_lr": 0.005,
            "stop_lr": 1e-4,
            "decay_steps": max(1, steps // 10),
            "scale_by_worker": "none",
        },
        "loss": {
            "start_pref_e": 0.02,
            "limit_pref_e": 1,
            "start_pref_f": 100,
            "limit_pref_f": 1,
        },
        "training": {
            "training_data": data,
            "validation_data": {"systems": [str(work / "valid")], "batch_size": 20},
            "numb_steps": steps,
            "seed": seed,
            "disp_freq": max(1, steps // 4),
            "save_freq": max(1, steps // 2),
        },
    }


def go_on(folder: Path, work: Path) -> None:
    """Goes on from the checkpoint on two processes; freezes, compresses, tests."""
    content = json.loads((folder / "input.json").read_text())
    steps = content["training"]["numb_steps"] + 20
    content["training"]["numb_steps"] = steps
    content["training"]["disp_freq"] = 5
    (folder / "longer.json").write_text(json.dumps(content))
    again = ["train", "longer.json", "--restart", "model.ckpt", "--skip-neighbor-stat"]
    run(again, folder, 2)
    assert np.isfinite(read_loss(folder, steps))
    run(["freeze", "-o", "frozen.pb"], folder, 1)
    test = ["test", "-s", str(work / "valid"), "-n", "20"]
    for arguments in (
        [*test, "-m", "frozen.pb"],
        ["compress", "-i", "frozen.pb", "-o", "small.pb", "-t", "input.json"],
        [*test, "-m", "small.pb"],
    ):
        run(arguments, folder, 1)


def run(arguments: list[str], folder: Path, workers: int) -> None:
    """Runs ``dp --tf`` in one process, or in several under the launcher."""
    command = [sys.executable, "-P", "-m", "deepmd", "--tf", *arguments]
    if workers > 1:
        launcher = [sys.executable, "-m", "tw_launch", "--horovod"]
        command = [*launcher, "-np", str(workers), "--", *command]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TF_INTER_OP_PARALLELISM_THREADS": "2"}
    succeed(command, cwd=folder, env=env, deadline_s=DEADLINE_S)


if __name__ == "__main__":
    sys.exit(main())
