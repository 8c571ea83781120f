"""Programs that say ``import horovod`` run as they are, and train as one process."""

import itertools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import horovod_models
import numpy as np
import pytest
import tensorflow as tf
from harness.launches import finish, launch

import tw_horovod as hvd
import tw_horovod.keras as hvd_keras
from tw_horovod._state import group as state
from tw_horovod._unmodified import aliases, mpi_names
from tw_ranks._endpoint.keys import DifferenceError

PROGRAMS = Path(__file__).parent / "unmodified"
NAMES = Path(hvd.__file__).parent / "_unmodified" / "_python_path"
LAUNCHER = [sys.executable, "-m", "tw_launch", "--horovod", "-np", "2"]
DEADLINE_S = 150


def run(command, cwd=None, **variables):
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow(by_day=["loop"])
@pytest.mark.parametrize(
    ("program", "kinds", "is_keras_2"),
    [
        pytest.param("loop.py", ["plain"], False, id="loop"),
        pytest.param("session.py", ["plain"], False, id="session"),
        pytest.param("fit.py", ["plain"], False, id="fit"),
        pytest.param(
            *("fit.py", ["plain", "legacy", "passes", "scaled"], True),
            id="fit of Keras 2",
        ),
    ],
)
def test_a_program_of_horovod_trains_as_one_process(
    tmp_path, program, kinds, is_keras_2
):
    rows, targets = horovod_models.make_batch(2)
    np.savez(tmp_path / "batch.npz", rows=rows, targets=targets)
    words = [str(PROGRAMS / program), str(tmp_path / "batch.npz"), str(tmp_path)]
    keras = {"TF_USE_LEGACY_KERAS": "1"} if is_keras_2 else {}
    status, said = run([*LAUNCHER, "--", sys.executable, *words, *kinds], **keras)
    assert status == 0, said
    for kind, rank in itertools.product(kinds, range(2)):
        factor = 2.0 if kind == "passes" else 1.0  # gradients of passes are added
        want = horovod_models.train(rows, targets, start=1.0, factor=factor)
        got = np.load(tmp_path / f"{kind}{rank}.npy")
        np.testing.assert_allclose(got, want, rtol=1e-4)
        if program == "fit.py" and kind != "passes":
            starts = [np.full([2], 1.0), *want[:-1]]
            losses = [np.mean((rows @ w - targets) ** 2) for w in starts]
            found = np.load(tmp_path / f"{kind}{rank}_loss.npy")
            np.testing.assert_allclose(found, losses, rtol=1e-4)


@pytest.mark.slow
def test_programs_of_keras_2_clip_warm_up_and_resume(tmp_path):
    words = [sys.executable, str(PROGRAMS / "keras_2.py"), str(tmp_path)]
    status, said = run([*LAUNCHER, "--", *words], TF_USE_LEGACY_KERAS="1")
    assert status == 0, said


@pytest.mark.slow
def test_any_launcher_can_start_it(tmp_path):
    (tmp_path / "light.py").write_text("import sys; print(__name__, sys.argv[1:])\n")
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "import horovod.tensorflow as hvd, horovod.keras, horovod.tensorflow.keras\n"
        "import tw_horovod as ours, horovod.tensorflow.mpi_ops as ops\n"
        "assert hvd is ours is ops is hvd.functions, hvd\n"
        "assert horovod.keras is horovod.tensorflow.keras is ours.keras\n"
        "assert ours.__spec__.name == ours.__name__ == 'tw_horovod'\n"
        "assert 'horovod.keras.callbacks' not in sys.modules\n"
        "import horovod.keras.callbacks as callbacks\n"
        "assert callbacks is ours.keras.callbacks is hvd.keras.callbacks\n"
        "hvd.init()\n"
        "import subprocess\n"
        "child = 'import horovod; print(horovod.__version__)'\n"
        "subprocess.run([sys.executable, '-c', child], check=True)\n"
        "print(__name__, sys.argv[1:], hvd.size())\n"
    )
    ends = {"light.py": "", "-m program": " 1"}
    for words, end in ends.items():
        command = [sys.executable, "-m", "tw_horovod", *words.split(), "--epochs", "3"]
        status, said = run(command, cwd=tmp_path)
        assert status == 0, said
        assert f"__main__ ['--epochs', '3']{end}\n" in said
    assert f"{aliases.VERSION}\n" in said  # of a child


def test_a_program_is_asked_for():
    status, said = run([sys.executable, "-m", "tw_horovod"])
    assert status == 1 and "usage: python -m tw_horovod [-m MODULE" in said


@pytest.fixture
def horovod(monkeypatch):
    monkeypatch.syspath_prepend(str(NAMES))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = dict(sys.modules)
    import horovod

    yield horovod
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] == "horovod":
            del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch", "use torch.nn.parallel.DistributedDataParallel"),
        ("spark", "start the program with tw-launch --horovod on each machine"),
        ("runner", "start the program with tw-launch --horovod -np N"),
        ("common", "tw_horovod has the names that programs import"),
    ],
)
def test_other_modules_of_horovod_are_refused_by_name(horovod, name, words):
    message = rf"horovod.{name}: not supported by tw_horovod: {words}"
    with pytest.raises(ModuleNotFoundError, match=message):
        __import__(f"horovod.{name}.anything")
    with pytest.raises(AttributeError, match=message):
        getattr(horovod, name)


def test_the_elastic_modules_are_refused_by_name(horovod):
    import horovod.keras.elastic
    import horovod.tensorflow.elastic
    import horovod.tensorflow.keras.elastic

    modules = (horovod.keras, horovod.tensorflow, horovod.tensorflow.keras)
    for module in modules:
        with pytest.raises(NotImplementedError, match=r"elastic\.run: not supported"):
            _ = module.elastic.run
        assert module.elastic is hvd.elastic


def set_tf_config(monkeypatch, rank, **jobs):
    cluster = {job: [f"{job}:{n}" for n in range(1, 1 + k)] for job, k in jobs.items()}
    task = {"type": "worker", "index": rank}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))


def stand_in(tmp_path, monkeypatch):
    """Imports what stands where ``absent_mpi`` may be installed."""
    folder = tmp_path / "names"
    folder.mkdir()
    (folder / "absent_mpi.py").write_text(
        "from tw_horovod._unmodified import mpi_names\n"
        "mpi_names.find(__name__, __file__)\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "absent_mpi", raising=False)
    monkeypatch.delitem(sys.modules, "absent_mpi.MPI", raising=False)
    before = list(sys.path)
    from absent_mpi import MPI

    assert sys.path == before
    return MPI


def test_without_mpi_its_world_is_that_of_the_ranks(tmp_path, monkeypatch):
    set_tf_config(monkeypatch, 1, worker=3)
    world = stand_in(tmp_path, monkeypatch).COMM_WORLD
    assert (world.Get_rank(), world.Get_size(), world.rank, world.size) == (1, 3, 1, 3)
    monkeypatch.delenv("TF_CONFIG")
    try:  # Without hvd.init, which programs of MPI alone do not call.
        array, total = np.arange(3), np.zeros([3], int)
        world.Bcast(array)
        world.Barrier()
        assert world.bcast("one") == "one" and world.allgather(2) == [2]
        assert world.gather(2) == [2] and world.allreduce(2.5) == 2.5
        world.Allreduce(array, total, op=sys.modules["absent_mpi.MPI"].SUM)
        np.testing.assert_array_equal(array, [0, 1, 2])
        np.testing.assert_array_equal(total, [0, 1, 2])
    finally:
        hvd.shutdown()


def test_what_stands_for_mpi_tells_the_rank_without_tensorflow():
    program = (
        "import sys\n"
        "from tw_horovod._unmodified import mpi_names\n"
        "print(mpi_names._AllRanks().rank, 'tensorflow' in sys.modules)"
    )
    status, said = run([sys.executable, "-c", program])
    assert (status, said.split()) == (0, ["0", "False"])


def test_what_stands_for_mpi_says_what_to_do_for_the_rest(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch)
    for owner, name in [("absent_mpi", "rc"), ("absent_mpi.MPI", "Win")]:
        says = rf"{owner}.{name}: tw-launch --horovod has MPI.COMM_WORLD.*nstall mpi4py"
        with pytest.raises(AttributeError, match=says):
            getattr(sys.modules[owner], name)


def test_mpi_that_begins_after_tensorflow_says_when_to_begin(monkeypatch):
    def init():
        raise RuntimeError("join: TensorFlow's runtime has already started")

    monkeypatch.setattr(hvd, "init", init)
    with pytest.raises(RuntimeError, match="already started") as raised:
        mpi_names._AllRanks().Barrier()
    assert (
        "MPI.COMM_WORLD.Barrier() when the program begins" in raised.value.__notes__[0]
    )


@pytest.mark.parametrize("size", [1, 2])
def test_mpi_where_it_is_installed_is_itself(tmp_path, monkeypatch, caplog, size):
    installed = tmp_path / "site" / "absent_mpi"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    (installed / "MPI.py").write_text("COMM_WORLD = 'theirs'\n")
    monkeypatch.syspath_prepend(str(installed.parent))
    for name in mpi_names._LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    set_tf_config(monkeypatch, 0, worker=size)
    with caplog.at_level(logging.WARNING):
        assert stand_in(tmp_path, monkeypatch).COMM_WORLD == "theirs"
    assert ("process is rank 0 to MPI" in caplog.text) == (size == 2)


def test_init_under_parameter_servers_says_how_to_start(monkeypatch):
    set_tf_config(monkeypatch, 0, ps=1, worker=2)
    with pytest.raises(ValueError, match=r"tw-launch --horovod -np N.*tw-launch -n N"):
        hvd.init()


def test_init_under_half_a_launcher_of_horovod_is_refused(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    with pytest.raises(ValueError, match="no HOROVOD_RANK and HOROVOD_SIZE=4"):
        hvd.init()
    assert not hvd.is_initialized()


def test_variables_that_change_nothing_are_named_once(monkeypatch, caplog):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name in ("FUSION_THRESHOLD", "CYCLE_TIME", "START_TIMEOUT", "LOCAL_RANK"):
        monkeypatch.setenv(f"HOROVOD_{name}", "1")
    with caplog.at_level(logging.WARNING, "tw_horovod"):
        hvd.init()
        hvd.init()
    hvd.shutdown()
    [record] = caplog.records
    assert record.getMessage() == (
        "init: these have no effect here: HOROVOD_CYCLE_TIME, HOROVOD_FUSION_THRESHOLD."
    )


def test_ranks_that_differ_raise_what_horovod_raises():
    kinds = (tf.errors.FailedPreconditionError, ValueError)
    for kind in kinds:
        with pytest.raises(kind, match=r"^tensor 0 is another$"):
            raise DifferenceError(None, None, "tensor 0 is another")


def test_launched_programs_of_horovod_find_its_variables_and_names():
    program = (
        "names = ['HOROVOD_RANK', 'OMPI_COMM_WORLD_SIZE', 'HOROVOD_LOCAL_RANK']\n"
        "print(job, [os.environ[name] for name in names], flush=True)\n"
        "print(os.environ['PYTHONPATH'].split(os.pathsep)[-1], flush=True)\n"
        "import horovod; print(horovod.__version__, flush=True)\n"
    )
    before = os.environ.get("PYTHONPATH", "")
    env = {**os.environ, "PYTHONPATH": f"{before}{os.pathsep}/own"}
    status, out, err = finish(launch(program, "--horovod", "-np", "3", env=env))
    assert status == 0, err
    for rank in range(3):
        assert f"[worker {rank}] worker ['{rank}', '3', '{rank}']\n" in out
        assert f"[worker {rank}] /own\n" in out
    assert out.count("0.28.1\n") == 3


def test_the_best_model_is_saved_to_a_path_that_is_set_later(tmp_path, monkeypatch):
    import keras

    monkeypatch.setattr(state, "_group", None)
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    best = hvd_keras.callbacks.BestModelCheckpoint(monitor="loss")
    rows = np.ones([4, 2], "float32")
    with pytest.raises(ValueError, match="BestModelCheckpoint: filepath is not set"):
        model.fit(rows, rows[:, :1], verbose=0, callbacks=[best])
    best.filepath = str(tmp_path / "best.keras")
    model.fit(rows, rows[:, :1], epochs=3, verbose=0, callbacks=[best])
    found = keras.models.load_model(best.filepath).evaluate(
        rows, rows[:, :1], verbose=0
    )
    assert found <= best.best
