"""Clusters' launchers: each starts two processes of docs/examples/cluster/fit.py.

The launchers are ``srun`` and ``sbatch`` of a Slurm that is started here, ``mpiexec``
of the ``mpich`` wheel, ``mpirun`` of Open MPI, ``torchrun``, and Ray's
``TensorflowTrainer``. None is given more than the program: ``tw_ranks.join()`` finds
rank, size and rank 0's address. Rank 0's weights are compared with those of plain Keras
on one device.

Slurm and Open MPI are the system's, as of ``apt-get install slurm-wlm munge
openmpi-bin``; Slurm's daemons need root. Launchers that this machine cannot start are
skipped, and the reason is printed.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from harness.processes import succeed

DEADLINE_S = 600
BIN = Path(sys.executable).parent
ALONE = """
import fit, numpy
model = fit.make_model()
fit.train(model, fit.parser.parse_args([]))
numpy.savez("alone.npz", *model.get_weights())
"""
FOLDER = Path(__file__).parents[3] / "docs" / "examples" / "cluster"
SLURM = """\
ClusterName=towers
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP MaxTime=INFINITE
"""
MUNGE = Path("/run/munge")


class Skipped(Exception):
    """This machine cannot start a launcher, for this reason."""


def main() -> int:
    """Trains on one device, and by every launcher."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(LAUNCHERS)}; or all")
    names = parser.parse_args().names or list(LAUNCHERS)
    if unknown := set(names) - set(LAUNCHERS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for path in FOLDER.glob("*fit*"):
            shutil.copy(path, work)
        run([sys.executable, "-c", ALONE], work)
        wanted = read(work / "alone.npz")
        skipped = 0
        for name in names:
            try:
                out = LAUNCHERS[name](work, str(work / f"{name}.npz"))
            except Skipped as reason:
                print(f"{name}: SKIPPED, {reason}", flush=True)
                skipped += 1
                continue
            assert all(f"rank {rank} of 2: " in out for rank in (0, 1)), out
            got = read(work / f"{name}.npz")
            for one, other in zip(got, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
            [found] = set(re.findall(r"join: (rank 0 of 2 .*)", out))
            print(f"{name}: as on one device; {found}", flush=True)
    return int(skipped == len(names))


def by_mpich(work: Path, path: str) -> str:
    """By Hydra, MPICH's, which knows no other process."""
    mpiexec = BIN / "mpiexec"
    if not mpiexec.exists():
        raise Skipped("the mpich wheel is not installed")
    return run(
        [str(mpiexec), "-n", "2", sys.executable, "fit.py", "--weights", path], work
    )


def by_open_mpi(work: Path, path: str) -> str:
    mpirun = shutil.which("mpirun.openmpi")
    if mpirun is None:
        raise Skipped("mpirun.openmpi is missing; apt-get install openmpi-bin")
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
    return run([mpirun, *options, sys.executable, "fit.py", "--weights", path], work)


def by_torchrun(work: Path, path: str) -> str:
    if not (BIN / "torchrun").exists():
        raise Skipped("PyTorch is not installed")
    options = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return run([sys.executable, *options, "fit.py", "--weights", path], work)


def by_ray(work: Path, path: str) -> str:
    if not (BIN / "ray").exists():
        raise Skipped("Ray is not installed")
    command = [sys.executable, "ray_fit.py", "--cpus", "0.5", "--", "--weights", path]
    out = run(command, work, RAY_USAGE_STATS_ENABLED="0")
    assert "without a key" not in out, out
    return out


def by_slurm(work: Path, path: str) -> str:
    with slurm(work) as conf:
        program = [sys.executable, "fit.py", "--weights", path]
        srun = ["srun", "-n", "2", "--overlap", *program]
        return run(srun, work, SLURM_CONF=str(conf))


def by_batch_script(work: Path, path: str) -> str:
    options = ["-W", "-N1", "--ntasks-per-node=2", "-c1", "-o", "batch.txt"]
    script = ["fit.sbatch", "--weights", path]
    paths = os.pathsep.join([str(BIN), os.environ["PATH"]])
    with slurm(work) as conf:
        run(["sbatch", *options, *script], work, SLURM_CONF=str(conf), PATH=paths)
    return (work / "batch.txt").read_text()


LAUNCHERS: dict[str, Callable[[Path, str], str]] = {
    "mpich": by_mpich,
    "open-mpi": by_open_mpi,
    "srun": by_slurm,
    "sbatch": by_batch_script,
    "torchrun": by_torchrun,
    "ray": by_ray,
}


@contextlib.contextmanager
def slurm(work: Path) -> Iterator[Path]:
    """A Slurm of this machine alone; its daemons end with the context."""
    daemons = ["munged", "slurmctld", "slurmd"]
    found = [shutil.which(d, path=f"{os.environ['PATH']}:/usr/sbin") for d in daemons]
    if not all(found):
        raise Skipped(f"needs {', '.join(daemons)}; apt-get install slurm-wlm munge")
    if os.getuid() != 0:
        raise Skipped("Slurm's daemons need root")
    munged, slurmctld, slurmd = found
    folder = Path(tempfile.mkdtemp(dir=work))
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(socket.create_server(("", 0))) for _ in range(2)]
        given = {"ports": [port.getsockname()[1] for port in ports]}
    conf = folder / "slurm.conf"
    host = socket.gethostname()
    conf.write_text(SLURM.format(host=host, folder=folder, **given))
    pids = [folder / "slurmd.pid", folder / "slurmctld.pid"]
    try:
        if not (MUNGE / "munge.socket.2").exists():
            MUNGE.mkdir(exist_ok=True)
            shutil.chown(MUNGE, "munge", "munge")
            run(["su", "-s", "/bin/sh", "munge", "-c", munged], work)
            pids.append(MUNGE / "munged.pid")
        run([slurmctld, "-f", str(conf), "-L", str(folder / "slurmctld.log")], work)
        run([slurmd, "-f", str(conf), "-L", str(folder / "slurmd.log")], work)
        end_s = time.monotonic() + 30
        while run(["sinfo", "-h", "-o", "%t"], work, SLURM_CONF=str(conf)) != "idle\n":
            if time.monotonic() > end_s:
                raise Skipped(
                    f"no node is idle:\n{(folder / 'slurmd.log').read_text()}"
                )
            time.sleep(0.5)
        yield conf
    finally:
        for pid in pids:
            with contextlib.suppress(OSError, ValueError):
                end(int(pid.read_text()))


def end(process: int) -> None:
    """Ends a daemon, and waits until it is gone."""
    os.kill(process, signal.SIGTERM)
    end_s = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end_s:
            os.kill(process, 0)
            time.sleep(0.1)
        os.kill(process, signal.SIGKILL)


def run(command: list[str], work: Path, **environment: str) -> str:
    """Runs a command; returns what it prints, and fails if it fails."""
    env = {**os.environ, **environment}
    return succeed(command, cwd=work, env=env, deadline_s=DEADLINE_S)


def read(path: Path) -> list[np.ndarray]:
    """Reads weights in their order."""
    with np.load(path) as held:
        return [held[name] for name in held.files]


if __name__ == "__main__":
    sys.exit(main())
