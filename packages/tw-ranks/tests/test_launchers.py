"""What launchers tell a process: environments as they were recorded, or documented."""

import json
import logging

import pytest

from tw_ranks._joining import seats
from tw_ranks._joining.launchers import (
    FIRST_PORT,
    NUM_PORTS,
    derive_port,
    expand_nodes,
    find_places,
)
from tw_ranks._joining.seats import Seat, find_seat
from tw_ranks._side_channel._introduction import find_run


def env(text):
    """Reads an environment as the command ``env`` prints it."""
    return dict(pair.split("=", 1) for pair in text.split())


# Of two processes on one machine, the second's, without what is the same elsewhere.
MPICH = env("""
    HYDI_CONTROL_FD=7 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=11
    PMI_HOSTNAME=node1 PMI_RANK=1 PMI_SIZE=2
""")
OPEN_MPI = env("""
    OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
    OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2
    OMPI_MCA_ess_base_jobid=372506625 OMPI_UNIVERSE_SIZE=2 PMIX_ID=372506625.1
    PMIX_NAMESPACE=372506625 PMIX_RANK=1
""")
BATCH = env("""
    SLURM_JOB_ID=2 SLURM_JOB_NODELIST=node1 SLURM_LOCALID=0 SLURM_NNODES=1
    SLURM_NODEID=0 SLURM_NODELIST=node1 SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_PROCID=0
    SLURM_TASKS_PER_NODE=2
""")
SALLOC = {name: BATCH[name] for name in BATCH if name[6:] not in ("PROCID", "LOCALID")}
SRUN = BATCH | env("""
    SLURM_LOCALID=1 SLURM_PROCID=1 SLURM_STEPID=0 SLURM_STEP_ID=0
    SLURM_STEP_NODELIST=node1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=2
    SLURM_STEP_TASKS_PER_NODE=2
""")
SRUN_PMI2 = {**SRUN, "PMI_JOBID": "2.0", "PMI_RANK": "1", "PMI_SIZE": "2"}
SRUN_PMIX = {**SRUN, "PMIX_NAMESPACE": "slurm.pmix.2.0", "PMIX_RANK": "1"}
SRUN_NODES = {
    **SRUN,
    "SLURM_JOB_NODELIST": "gpu[07-08,11]",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_STEP_NUM_TASKS": "6",
}
TORCHRUN = env("""
    GROUP_RANK=0 GROUP_WORLD_SIZE=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2
    MASTER_ADDR=localhost MASTER_PORT=36889 RANK=1 TORCHELASTIC_RESTART_COUNT=0
    TORCHELASTIC_RUN_ID=4174e3a4 TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=2
""")
TORCHRUN_NODES = {**TORCHRUN, "MASTER_ADDR": "node1", "RANK": "3", "WORLD_SIZE": "4"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "2222"}
HOROVODRUN = env("""
    HOROVOD_GLOO_RENDEZVOUS_PORT=41000 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2
    HOROVOD_RANK=1 HOROVOD_SIZE=2
""")
INDEXED_JOB = {
    "HOSTNAME": "train-1",
    "JOB_COMPLETION_INDEX": "1",
    "TW_SERVICE": "workers",
    "TW_SIZE": "2",
}
TRAINER = env("""
    HOSTNAME=digits-node-0-1 JOB_COMPLETION_INDEX=1
    PET_MASTER_ADDR=digits-node-0-0.digits PET_MASTER_PORT=29500 PET_NNODES=2
    PET_NODE_RANK=1 PET_NPROC_PER_NODE=8
""")
TF_CONFIG = json.dumps(
    {
        "cluster": {"worker": ["10.0.0.1:53435", "10.0.0.2:32883"]},
        "task": {"type": "worker", "index": 1},
    }
)
RAY = {"RAY_JOB_ID": "01000000", "TF_CONFIG": TF_CONFIG}
ONE_WORKER = json.dumps(
    {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}
)


@pytest.fixture
def find(monkeypatch):
    """Finds the seat of a process that has no other environment."""
    monkeypatch.setattr("tw_ranks._joining.launchers._find_ancestor", lambda _: 42)

    def found(environment, *arguments, **options):
        monkeypatch.setattr(seats.os, "environ", environment)
        return find_seat(*arguments, **options)

    return found


def without(environment, *names):
    return {name: environment[name] for name in environment if name not in names}


HERE = "localhost"
MPI_JOB = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")


@pytest.mark.parametrize(
    ("environment", "rank", "size", "coordinator", "mpi_launcher"),
    [
        (MPICH, 1, 2, (HERE, "Hydra 42"), "mpiexec (MPICH)"),
        (OPEN_MPI, 1, 2, (HERE, "372506625"), "mpirun (Open MPI)"),
        (SRUN, 1, 2, (HERE, "Slurm 2.0"), ""),
        (SRUN_PMI2, 1, 2, (HERE, "Slurm 2.0"), "srun --mpi=pmi"),
        (SRUN_PMIX, 1, 2, (HERE, "Slurm 2.0"), "srun --mpi=pmix"),
        (SRUN_NODES, 5, 6, ("gpu07", "Slurm 2.0"), ""),
        (
            {**SRUN_NODES, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "6"},
            *(1, 6, ("gpu07", "Slurm 2"), "mpirun (Open MPI)"),
        ),
        (TORCHRUN, 1, 2, (HERE, "torchrun 4174e3a4 localhost 36889"), ""),
        (TORCHRUN_NODES, 3, 4, ("node1", "torchrun 4174e3a4 node1 36889"), ""),
        (
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"},
            *(1, 2, (HERE, 36889), ""),
        ),
        (BY_HAND, 1, 2, ("a", 2222), ""),
        # What tw-launch shows programs of Horovod is no MPI.
        (
            {**without(OPEN_MPI, *MPI_JOB), "TF_CONFIG": TF_CONFIG},
            *(1, 2, ("10.0.0.1", 53435), ""),
        ),
        (HOROVODRUN, 1, 2, (HERE, "horovodrun 41000"), ""),
        (TRAINER, 1, 2, ("digits-node-0-0.digits", 29500), ""),
        (INDEXED_JOB, 1, 2, ("train-0.workers", "Job train-0.workers"), ""),
        (RAY, 1, 2, ("10.0.0.1", 53435), ""),
        # A batch script, a shell of salloc, and a shell that Slurm numbers.
        (BATCH, 0, 1, (HERE, 0), ""),
        (SALLOC, 0, 1, (HERE, 0), ""),
        ({**SRUN, "SLURM_STEP_ID": "4294967290"}, 0, 1, (HERE, 0), ""),
        ({**SRUN, "SLURM_STEP_ID": "batch"}, 0, 1, (HERE, 0), ""),
        ({}, 0, 1, (HERE, 0), ""),
        ({**MPICH, "PMI_RANK": "0", "PMI_SIZE": "1"}, 0, 1, (HERE, 0), ""),
        ({"RANK": "3"}, 0, 1, (HERE, 0), ""),  # Anybody's.
    ],
)
def test_every_launcher_gives_a_process_its_place(
    find, environment, rank, size, coordinator, mpi_launcher
):
    seat = find(environment)
    host, port = coordinator
    port = port if isinstance(port, int) else derive_port(port)
    assert (seat.rank, seat.size, seat.coordinator) == (rank, size, (host, port))
    assert seat.mpi_launcher == mpi_launcher
    assert seat.spans_machines == (size > 1 and host[0] not in "al")


@pytest.mark.parametrize(
    ("hosts", "spans_machines"),
    [("ab", True), ("aa", False), (("localhost", "a"), False), (("[::1]", "a"), False)],
)
def test_tf_config_tells_whether_there_are_several_machines(
    find, hosts, spans_machines
):
    listed = [f"{host}:{port}" for port, host in enumerate(hosts, start=1)]
    told = {"cluster": {"worker": listed}, "task": {"type": "worker", "index": 0}}
    assert find({"TF_CONFIG": json.dumps(told)}).spans_machines == spans_machines


def test_all_ranks_of_a_launcher_have_one_coordinator(find):
    zeroth = {**SRUN_NODES, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    first, last = find(zeroth), find(SRUN_NODES)
    assert first.coordinator == last.coordinator
    assert (first.host, last.host) == ("gpu07", "")


@pytest.mark.parametrize(
    ("environment", "launcher", "overridden"),
    [
        ({**SRUN, **TORCHRUN_NODES}, "torchrun", "srun (rank 1 of 2)"),
        ({**SRUN, **MPICH}, "mpiexec (MPICH)", "srun (rank 1 of 2)"),
        ({**SRUN, **OPEN_MPI}, "mpirun (Open MPI)", "srun (rank 1 of 2)"),
        ({**SRUN, **RAY}, "TF_CONFIG", "srun (rank 1 of 2)"),
        (
            {**TRAINER, **TORCHRUN},
            "torchrun",
            "Kubeflow Trainer (rank 1 of 2), Kubernetes Job "
            "(the environment has JOB_COMPLETION_INDEX=1 and no TW_SIZE)",
        ),
    ],
)
def test_the_innermost_launcher_wins_and_a_line_says_what_it_overrides(
    find, caplog, environment, launcher, overridden
):
    caplog.set_level(logging.INFO)
    find(environment)
    [line] = caplog.messages
    assert f" by {launcher}, rank 0 at " in line
    assert f"; overrides {overridden}" in line


def test_arguments_override_all(find, caplog):
    caplog.set_level(logging.INFO)
    seat = find({**SRUN_PMIX, **RAY}, "there:1", 1, 2)
    assert seat == Seat(1, 2, ("there", 1), "", None, "srun --mpi=pmix")
    assert "by the arguments, rank 0 at there:1; overrides srun" in caplog.text


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({**SRUN, "SLURM_PROCID": "2"}, "SLURM_PROCID=2 and SLURM_STEP_NUM_TASKS=2"),
        (without(SRUN, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST is not set"),
        (without(MPICH, "PMI_SIZE"), "has PMI_RANK=1 and no PMI_SIZE; correct"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), "has no OMPI_COMM_WORLD_RANK"),
        (without(TORCHRUN, "WORLD_SIZE"), "has RANK=1 and no WORLD_SIZE"),
        (without(BY_HAND, "MASTER_ADDR"), "MASTER_ADDR is not set"),
        (without(HOROVODRUN, "HOROVOD_SIZE"), "HOROVOD_RANK=1 and no HOROVOD_SIZE"),
        ({**TRAINER, "PET_NNODES": "1:4"}, "PET_NODE_RANK=1 and PET_NNODES=1:4"),
        (without(INDEXED_JOB, "TW_SIZE"), "JOB_COMPLETION_INDEX=1 and no TW_SIZE"),
        (without(INDEXED_JOB, "TW_SERVICE"), "do not name a pod job-1 of a headless"),
        ({"PMIX_RANK": "1"}, "environment has PMIX_RANK=1 and no PMI_SIZE"),
        # Several machines, and nothing tells which has rank 0.
        ({**MPICH, "PMI_SIZE": "4"}, "pip install mpi4py, by which rank 0"),
        ({**HOROVODRUN, "HOROVOD_SIZE": "4"}, "start it with tw-launch, or call join("),
        # One training for each process.
        ({**MPICH, "TF_CONFIG": ONE_WORKER}, "each would train separately"),
        (
            {**SRUN, **TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"},
            "by torchrun this process is alone, but srun has started it as rank 1 of 2",
        ),
    ],
)
def test_what_is_no_group_is_refused(find, environment, says):
    with pytest.raises(ValueError, match=r"^join: ") as refused:
        find(environment)
    assert says in str(refused.value)


def test_where_only_mpi_tells_the_coordinator_it_is_left_to_it(find):
    seat = find({**MPICH, "PMI_SIZE": "4"}, has_mpi4py=True)
    assert (seat.rank, seat.size, seat.is_told) == (1, 4, True)
    assert seat.mpi_launcher == "mpiexec (MPICH)"
    assert not find(SRUN_PMIX, has_mpi4py=True).is_told


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("gpu[9-11]-ib,login", ["gpu9-ib", "gpu10-ib", "gpu11-ib", "login"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("", []),
    ],
)
def test_node_lists_are_expanded_in_order(nodes, hosts):
    assert list(expand_nodes(nodes)) == hosts


def test_ports_of_jobs_lie_in_a_range_and_seldom_meet():
    ports = [derive_port(f"Slurm {job}.0") for job in range(300)]
    assert all(FIRST_PORT <= port < FIRST_PORT + NUM_PORTS for port in ports)
    assert len(set(ports)) > 280  # 295 of 300 are to be expected of chance.


def test_a_run_has_one_name_on_all_its_nodes():
    """Of mpiexec in a Slurm job, only the other nodes' processes are in a step."""
    there = find_run({**SRUN, **MPICH})
    assert there == find_run({**BATCH, **MPICH}) == ("SLURM_JOB_ID=2", 0)
    assert find_run(SRUN_PMIX)[0] == "PMIX_NAMESPACE=slurm.pmix.2.0"


def test_no_launcher_is_found_where_there_is_none():
    assert find_places({"PATH": "/bin", "HOSTNAME": "node1"}) == []
