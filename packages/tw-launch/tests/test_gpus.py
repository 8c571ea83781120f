"""tw-launch shares out the GPUs that CUDA_VISIBLE_DEVICES or the driver lists.

Private modules are imported for what a launch decides before it starts anything. No
GPU is needed: drivers and nvidia-smi are fakes.
"""

import contextlib

import pytest

from tw_launch._launcher.machine import find_gpus, share_gpus
from tw_launch._launcher.messages import Start
from tw_launch._launcher.plan import Share, plan_tasks
from tw_launch._launcher.pmi import PmiTable


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without nvidia-smi, whose driver's folder is returned."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "gpus"


@pytest.mark.parametrize(
    ("count", "workers", "per_task", "want"),
    [
        (4, 2, None, ("0,1", "2,3")),
        (5, 2, None, ("0,1", "2,3")),
        (4, 1, None, ("0,1,2,3",)),
        (4, 2, 1, ("0", "1")),
        (4, 2, 0, ("", "")),
        (1, 2, None, ("", "")),
        (0, 2, None, (None, None)),
        (0, 2, 0, ("", "")),
        (4, 0, None, ()),
    ],
)
def test_workers_share_gpus_in_order(count, workers, per_task, want):
    gpus = [str(n) for n in range(count)]
    assert share_gpus(gpus, workers=workers, per_task=per_task) == want


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        (
            ["3", "1"],
            r"--gpus-per-task 2 of 2 workers needs 4 GPUs; there are 2 \(3, 1\)",
        ),
        ([], r"--gpus-per-task 2 of 2 workers needs 4 GPUs; there are none"),
    ],
)
def test_more_than_there_are_is_refused(gpus, says):
    with pytest.raises(ValueError, match=says):
        share_gpus(gpus, workers=2, per_task=2)


def test_without_gpus_the_variable_of_workers_is_left_alone():
    share = Share(ps=1, workers=1, evaluators=0, gpus=(None,))
    server, worker = plan_tasks(share, Start(0, {}, 0, ""))
    assert server.variables["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in worker.variables


@pytest.mark.parametrize(
    ("listed", "want"),
    [
        ("", ()),
        ("3, 1", ("3", "1")),
        ("GPU-8d1f,MIG-77aa", ("GPU-8d1f", "MIG-77aa")),
        ("0,-1,1", ("0",)),
        ("-1", ()),
        ("NoDevFiles", ()),
    ],
)
def test_the_users_variable_is_read_as_cuda_reads_it(monkeypatch, listed, want):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert find_gpus() == want


def test_a_gpu_that_is_listed_twice_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,0")
    with pytest.raises(ValueError, match="each GPU once; got '0,1,0', which repeats 0"):
        find_gpus()


def test_gpus_are_counted_in_the_drivers_folder(machine):
    assert find_gpus(driver=machine) == ()
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (machine / bus).mkdir(parents=True)
    assert find_gpus(driver=machine) == ("0", "1")


def test_nvidia_smi_is_asked_first(machine):
    (machine / "0000:01:00.0").mkdir(parents=True)
    tool = machine.parent / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    lines = ["GPU 0: A", "  MIG 1g.5gb Device 0: (UUID: MIG-1)", "GPU 1: A"]
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    tool.chmod(0o755)
    assert find_gpus(driver=machine) == ("0", "1")
    tool.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert find_gpus(driver=machine) == ()


def test_programs_of_horovod_over_mpi_see_one_mpi():
    share = Share(ps=0, workers=1, evaluators=0, gpus=(None,), horovod="/names")
    start = Start(0, {"worker": ["a:1"]}, 0, "")
    [plain] = plan_tasks(share, start)
    with contextlib.closing(PmiTable(1)) as world:
        [over_mpi] = plan_tasks(share, start, world)
    assert plain.variables["OMPI_COMM_WORLD_RANK"] == "0"
    assert "OMPI_COMM_WORLD_RANK" not in over_mpi.variables
    assert over_mpi.variables["PMI_RANK"] == over_mpi.variables["HOROVOD_RANK"] == "0"
