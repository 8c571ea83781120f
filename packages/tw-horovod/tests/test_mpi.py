"""Exchanges over MPI: the programs of other tests, and what MPI alone has.

``TW_TEST_ENGINE=mpi`` runs all tests of ranks over MPI.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import horovod_ranks
import numpy as np
import pytest
from harness.launches import finish, launch
from harness.processes import Program
from harness.ranks import ENGINE, Raised, Ranks

from tw_launch import main

pytest.importorskip("mpi4py")
PACKAGES = Path(__file__).parents[2]
MODES = ["eager", "function", "session"]
SAME = [
    *("sums_across", "broadcast", "uneven_ends", "matching", "horovod_ops"),
    *("lost_ranks", "rank_endings", "horovod_lost_ranks"),
]


@pytest.fixture(scope="module", params=[3])
def ranks(request, processes):
    group = Ranks(processes, request.param, engine="mpi").joined()
    yield group
    group.end()


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_programs_of_ranks_run_as_over_tensorflow(name):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, ENGINE: "mpi"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    [path] = PACKAGES.glob(f"*/tests/test_{name}.py")
    ran = Program([*command, path], env=environment)
    assert ran.finish(900) == 0, ran.out[-4000:]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options", [{}, {"mean": True}, {"wire_dtype": "bfloat16"}], ids=str
)
def test_all_get_the_numpy_sum(ranks, mode, options):
    size = len(ranks.all)
    draw = np.random.default_rng(7)
    shapes = [(3,), (), (0,), (70_001,), (1_000_000,)]
    own = [
        [draw.integers(-8, 8, s).astype(np.float32) * size for s in shapes]
        for _ in ranks.all
    ]
    sparse = [
        (np.full([r + 1, 2], r + 1.0, np.float32), np.arange(r + 1))
        for r in range(size)
    ]
    calls = [
        (mode, [[*dense, (*rows, np.array([9, 2]))]], options, 3)
        for dense, rows in zip(own, sparse, strict=True)
    ]
    share = size if options.get("mean") else 1
    for [[*sums, (values, indices)]] in ranks.call_each("reduce", calls):
        for n, got in enumerate(sums):
            want = np.sum([tensors[n] for tensors in own], axis=0) / share
            np.testing.assert_array_equal(got, want)
        want = np.concatenate([rows[0] for rows in sparse]) / share
        np.testing.assert_allclose(values, want, rtol=2**-7)
        np.testing.assert_array_equal(indices, np.concatenate([r[1] for r in sparse]))


@pytest.mark.parametrize("mode", ["function", "session"])
@pytest.mark.parametrize("threads", [0, 1])
def test_named_ops_run_in_unlike_orders(processes, mode, threads):
    group = horovod_ranks.make(processes, 2, engine="mpi", threads=threads)
    try:
        names = [f"metric{n}" for n in range(8)]
        calls = [(mode, order, False, 3) for order in (names, names[::-1])]
        want = {name: len(name) * 1.5 for name in names}
        assert group.call_each("reduce_by_name", calls) == [[want] * 3] * 2
    finally:
        group.end()


def test_smallest_and_largest_are_the_same_bits_on_all_ranks(processes):
    group = horovod_ranks.make(processes, 2, engine="mpi")
    try:
        given = [np.array(a, np.float32) for a in ([0.0, np.nan, 1.0], [-0.0, 2, 3])]
        for op, last in ((3, 1.0), (4, 3.0)):  # Min, Max
            calls = [("allreduce", "function", array, {"op": op}) for array in given]
            one, two = group.call_each("call", calls)
            assert one.tobytes() == two.tobytes()
            assert np.isnan(one[1])
            assert one[2] == last
    finally:
        group.end()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("mode", ["function", "session"])
def test_a_lost_rank_is_named_and_the_others_end(processes, mode, number):
    group = Ranks(
        processes, 3, engine="mpi", timeout_s=3.0, is_quiet=True, stall_timeout_s=60.0
    ).joined()
    try:
        assert group.call("step_until", 3, mode) == [9] * 3
        for rank in group.all:
            rank.say("step_until", None, mode)
        group.all[1].send(number)
        for rank in (group.all[0], group.all[2]):
            with pytest.raises(Raised, match=r"rank 1 \(.*\d+\) has ") as raised:
                rank.hear(40)
            if mode == "function":
                assert raised.value.missing == [1]
            rank.pipe.close()
        for rank in (group.all[0], group.all[2]):  # MPI's end does not wait for it.
            rank.process.join(30)
            assert not rank.process.is_alive()
    finally:
        group.end()


def test_ctrl_c_in_an_eager_exchange_precedes_the_exchange_s_error(processes):
    group = Ranks(processes, 2, engine="mpi", timeout_s=120.0).joined()
    try:
        one, other = group.all
        group.call("reduce", "eager", [[np.ones(4, np.float32)]], {}, 2)
        one.say("reduce_until_interrupted", "eager")  # The other does not come.
        time.sleep(1)
        one.send(signal.SIGINT)
        one.hear(20)
        assert other.process.is_alive()
    finally:
        group.end()


@pytest.mark.slow
def test_eager_exchanges_of_ever_new_shapes_share_a_communicator(ranks):
    size = float(len(ranks.all))
    for sums, _ in ranks.call("reduce_new_shapes", 300):
        assert sums == [size]


PROGRAM = """
import os, sys
os.environ.pop("TF_CONFIG", None)
import tensorflow as tf
import tw_ranks
group = tw_ranks.join()
[[total]] = tw_ranks.sum_across([[tf.constant([group.rank + 1.0])]], group=group)
line = f"{group.engine} {group.rank} {group.size} {int(total[0])} "
line += f"{len(group._member._key)}\\n"  # Of the key that rank 0 has sent.
print(line, end="", flush=True)  # At once, so that lines do not mix.
"""


@pytest.mark.slow
def test_mpiexec_starts_a_group_without_addresses(tmp_path):
    mpiexec = shutil.which("mpiexec", path=Path(sys.executable).parent)
    if mpiexec is None:
        pytest.skip("the mpich wheel is not installed")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [mpiexec, "-n", "2", sys.executable, str(program)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["mpi 0 2 3 32", "mpi 1 2 3 32"]


def test_tw_launch_makes_workers_an_mpi_world():
    program = """
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    print(world.rank == index, world.size, world.allreduce(index + 1), flush=True)
    """
    status, out, err = finish(launch(program, "--mpi", "--workers", "3"))
    assert status == 0, err
    assert sorted(out.splitlines()) == [f"[worker {n}] True 3 6" for n in range(3)]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_an_mpi_world_listens_to_no_other_machine():
    program = """
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()
    own = {os.readlink(one.path) for one in os.scandir("/proc/self/fd")}
    hosts = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as table:
            for fields in map(str.split, table):
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                    hosts.add(fields[1].partition(":")[0])
    print(sorted(hosts), flush=True)
    MPI.COMM_WORLD.Barrier()
    """
    status, out, err = finish(launch(program, "--mpi", "--workers", "2"))
    assert status == 0, err
    for line in out.splitlines():
        assert line.partition("] ")[2] in ("[]", "['0100007F']")


def test_tw_launch_starts_an_mpi_world_again():
    program = """
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()
    if start == 0 and index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    print(start, MPI.COMM_WORLD.allreduce(1), flush=True)
    """
    again = ("--restart", "group", "--max-restarts", "1", "--restart-delay", "0")
    status, out, err = finish(launch(program, "--mpi", *again, "--grace", "2"))
    assert status == 0, err
    assert sorted(out.splitlines()) == [f"[worker {n}] 1 2" for n in range(2)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ps", "1"], "drop --ps 1"),
        (["--nnodes", "2", "--coordinator", "a:1"], "is for one machine"),
        (["--max-restarts", "1"], "use --restart group"),
        (["--min-workers", "1"], "cannot continue without a worker"),
    ],
)
def test_what_mpi_cannot_do_is_refused(arguments, says, capsys):
    with pytest.raises(SystemExit):
        main(["--mpi", *arguments, "--", "true"])
    assert says in capsys.readouterr().err
