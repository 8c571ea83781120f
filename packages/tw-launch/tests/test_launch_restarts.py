"""tw-launch on one machine: restarts of all tasks, log files, summaries, modules."""

import io
import os
import re
import resource
import signal
import subprocess
import sys

import pytest
from harness.launches import finish, launch
from harness.processes import DEADLINE_S, is_alive, wait_until

from tw_launch import main
from tw_launch._launcher import options, plan
from tw_launch._launcher.output import TaskOutput

GROUP = ("--ps", "0", "--restart", "group", "--restart-delay", "0")


def test_a_group_that_fails_too_often_ends_with_the_last_first_failure(tmp_path):
    program = f"""
    open(f"{tmp_path}/{{index}}.{{start}}", "w").close()
    if index == 1:
        sys.exit(5 + start)
    time.sleep(60)
    """
    status, _, err = finish(launch(program, *GROUP, "--max-restarts", "2"))
    assert status == 7
    assert "worker 1 failed with status 7 after 3 start(s); ending all tasks" in err
    starts = {name for name in os.listdir(tmp_path) if name.startswith("1.")}
    assert starts == {"1.0", "1.1", "1.2"}


@pytest.mark.slow
def test_a_task_that_does_not_heed_the_end_of_its_group_is_killed():
    program = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(0.5)
    if start == 0:
        sys.exit(3) if index == 1 else time.sleep(60)
    print(f"start {start}")
    """
    options = ("--max-restarts", "1", "--grace", "1")
    status, out, err = finish(launch(program, *GROUP, *options))
    assert status == 0, err
    assert "[worker 0] start 1" in out


@pytest.mark.parametrize("phase", ["ending", "waiting"])
def test_a_signal_ends_a_launcher_in_the_middle_of_a_restart(phase):
    heed = "" if phase == "waiting" else "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    program = f"""
    {heed}
    print(os.getpid(), flush=True)
    if index == 1:
        sys.exit(3)
    time.sleep(60)
    """
    options = ("--restart", "group", "--max-restarts", "1", "--restart-delay", "30")
    process = launch(program, "--ps", "0", *options, "--grace", "1000")
    process.wait_for("restart 1 of 1")
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert status == 128 + signal.SIGINT
    assert "got SIGINT" in err
    pids = [int(pid) for pid in re.findall(r"^\[worker \d\] (\d+)$", out, re.MULTILINE)]
    assert len(pids) <= 2
    assert not any(map(is_alive, pids))


def test_each_start_of_a_task_has_a_log_file_of_whole_lines(tmp_path):
    program = """
    print("to out", flush=True)
    sys.stderr.write("no end")
    if index == 1 and not os.path.exists("again"):
        open("again", "w").close()
        sys.exit(4)
    """
    logs = tmp_path / "new" / "logs"
    options = ("--ps", "0", "--max-restarts", "1", "--log-dir", str(logs))
    status, out, err = finish(launch(program, *options, cwd=tmp_path))
    assert status == 0, err
    assert sorted(os.listdir(logs)) == [
        "worker-0.0.log",
        "worker-1.0.log",
        "worker-1.1.log",
    ]
    for path in logs.iterdir():
        assert sorted(path.read_text().splitlines(keepends=True)) == [
            "no end\n",
            "to out\n",
        ]
    assert out.count("[worker 1] to out\n") == 2


def test_the_logs_of_a_group_are_numbered_by_its_starts(tmp_path):
    program = """
    print("start", start, flush=True)
    if index == 1 and start == 0:
        sys.exit(4)
    if start == 0:
        time.sleep(60)
    """
    options = ("--max-restarts", "1", "--log-dir", str(tmp_path))
    (tmp_path / "worker-1.1.log").write_text("of an earlier run\n")
    assert finish(launch(program, *GROUP, *options))[0] == 0
    assert (tmp_path / "worker-1.0.log").read_text() == "start 0\n"
    assert (tmp_path / "worker-1.1.log").read_text() == "start 1\n"


def test_a_folder_that_takes_no_logs_is_refused_before_anything_starts(
    tmp_path, capsys
):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "logs"
    assert main(["--log-dir", str(folder), "--", "true"]) == 2
    says = f"--log-dir {folder}: cannot write there (Not a directory); pass a folder "
    assert capsys.readouterr() == ("", f"[tw-launch] {says}that can be written\n")


def test_a_full_disk_ends_the_log_and_not_the_task(tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # No file can grow.
    try:
        path = tmp_path / "worker-0.0.log"
        streams = io.BytesIO(b"one\ntwo\n"), io.BytesIO()
        TaskOutput("worker 0", *map(io.BufferedReader, streams), path).wait(10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    out, err = capsys.readouterr()
    assert out == "[worker 0] one\n[worker 0] two\n"
    assert err.count("worker-0.0.log: File too large; this log ends here") == 1


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_a_log_follows_no_link(tmp_path, kind):
    (tmp_path / "logs").mkdir()
    log, secret = tmp_path / "logs" / "worker-0.0.log", tmp_path / "secret"
    secret.write_text("kept")
    if kind == "link":
        log.symlink_to(secret)
    elif kind == "hard link":
        log.hardlink_to(secret)
    else:
        os.mkfifo(log)
    options = ("--ps", "0", "--workers", "1", "--log-dir", str(tmp_path / "logs"))
    status, out, err = finish(launch("print('one', flush=True)", *options))
    assert (status, out) == (0, "[worker 0] one\n")
    assert secret.read_text() == "kept"
    assert err.count("this log ends here") == 1


def test_a_folder_of_logs_is_no_link(tmp_path, capsys):
    folder = tmp_path / "link"
    folder.symlink_to(tmp_path)
    assert main(["--log-dir", str(folder), "--", "true"]) == 2
    assert f"pass the folder that it leads to, {tmp_path}" in capsys.readouterr().err


def test_a_summary_names_the_first_failure_its_last_lines_and_its_log(tmp_path):
    program = """
    def fail(*_):
        sys.exit(3)
    signal.signal(signal.SIGTERM, fail)
    if index == 1:
        while not os.path.exists("ready"):
            time.sleep(0.02)
        for number in range(30):
            print("line", number, file=sys.stderr)
        os.kill(os.getpid(), signal.SIGSEGV)
    open("ready", "w").close()
    time.sleep(60)
    """
    options = ("--ps", "0", "--log-dir", "logs")
    status, _, err = finish(launch(program, *options, cwd=tmp_path))
    assert status == 128 + signal.SIGSEGV
    said = [
        line.removeprefix("[tw-launch] ")
        for line in err.splitlines()
        if line.startswith("[tw-launch] ")
    ]
    assert said == [
        "worker 1 failed with status 139 after 1 start(s); ending all tasks",
        "the first task that failed: worker 1, SIGSEGV",
        f"its log: {tmp_path}/logs/worker-1.0.log",
        "its last lines:",
        *(f"  line {number}" for number in range(10, 30)),
        "1 more failed: worker 0 (exit code 3)",
    ]


def test_the_warning_of_an_open_server_leaves_the_last_lines_to_the_failure():
    program = """
    import warnings
    from tw_launch import ExposedServerWarning
    print("first", file=sys.stderr)
    warnings.warn("A TensorFlow server listens.", ExposedServerWarning)
    print("last", file=sys.stderr)
    sys.exit(3)
    """
    status, _, err = finish(launch(program, "--ps", "0", "--workers", "1"))
    assert status == 3
    assert "A TensorFlow server" in err  # as it was printed
    last = err[err.index("its last lines:") :]
    assert last.splitlines()[1:] == ["[tw-launch]   first", "[tw-launch]   last"]


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert re.fullmatch(
        r"tw-launch (\d[\w.]*|of unknown version)\n", capsys.readouterr().out
    )


def test_the_first_to_fail_is_named_though_all_have_failed_when_it_is_noticed():
    program = """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    print("pid", os.getpid(), flush=True)
    signal.sigwait([signal.SIGUSR1])
    sys.exit(5 + index)
    """
    process = launch(program, "--ps", "0", "--workers", "4")
    process.wait_for(r"(pid \d+\n.*){4}")
    found = re.findall(r"worker (\d)\] pid (\d+)\n", process.out)
    pids = {int(index): int(pid) for index, pid in found}
    process.send_signal(signal.SIGSTOP)
    for index in (2, 0, 3, 1):
        os.kill(pids[index], signal.SIGUSR1)
        wait_until(lambda pid=pids[index]: not is_alive(pid))
    process.send_signal(signal.SIGCONT)
    status, _, err = finish(process)
    assert status == 7
    assert "the first task that failed: worker 2, exit code 7" in err
    assert "3 more failed: worker 0 (exit code 5), worker 1 (exit code 6)" in err


def test_what_a_task_leaves_behind_ends_with_it():
    program = """
    import subprocess
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
    print(child.pid)
    """
    process = launch(program, "--ps", "0", "--workers", "1")
    status, out, _ = finish(process)
    assert status == 0
    child = int(out.split()[-1])
    wait_until(lambda: not is_alive(child))


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "package.told", "--ps", "9"),
        ("--", "-m", "package.told", "--ps", "9"),
        ("-m", "package.told", "--", "--ps", "9"),
        ("--", sys.executable, "-m", "package.told", "--ps", "9"),
        (sys.executable, "-m", "package.told", "--ps", "9"),
    ],
    ids=range(5),
)
def test_modules_and_commands_get_what_follows_as_it_is(tmp_path, words):
    (tmp_path / "package").mkdir()
    told = "import sys; print(sys.executable, sys.argv[1:])"
    (tmp_path / "package" / "told.py").write_text(told)
    launcher = [sys.executable, "-m", "tw_launch", "--ps", "0"]
    done = subprocess.run(
        [*launcher, "--workers", "1", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[worker 0] {sys.executable} ['--ps', '9']\n"


SEVERAL = ["--nnodes", "2", "--coordinator", "a:1"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "COMMAND is missing; put it after --, or a module after -m"),
        (["-m"], "COMMAND is missing"),
        (["--", "no-such-program"], "COMMAND 'no-such-program' cannot be run"),
        (["--evaluators", "2", "true"], "--evaluators must be 0 or 1"),
        (["--ps", "-1", "true"], "argument --ps: must be 0 or more; got '-1'"),
        (["--workers", "two", "true"], "--workers: must be 0 or more; got 'two'"),
        (["--gpus-per-task", "-1", "true"], "must be 0 or more; got '-1'"),
        (["--max-restarts", "-1", "true"], "must be 0 or more; got '-1'"),
        *(
            (["--grace", value, "true"], f"must be seconds, 0 or more; got '{value}'")
            for value in ("nan", "inf", "-1", "soon")
        ),
        (["--restart", "group", "true"], "needs --max-restarts, 1 or more"),
        (["--min-workers", "0", "true"], "must be 1 or more; got '0'"),
        (["--restart", "all", "true"], "--restart: invalid choice: 'all'"),
        (["--restart-delay", "1", "true"], "--restart-delay is for --restart group"),
        (["--min-workers", "3", "true"], "must not be above --workers 2; got 3"),
        (["--nnodes", "0", "true"], "--nnodes: must be 1 or more; got '0'"),
        (["--nnodes", "2", "true"], "--nnodes above 1 needs --coordinator"),
        (["--node-rank", "1", "true"], "--node-rank must be below --nnodes 1; got 1"),
        (["--coordinator", "a", "true"], "must be HOST:PORT; got 'a'"),
        ([*SEVERAL, "--isolate", "true"], "--isolate keeps the tasks out of"),
        ([*SEVERAL, "--node-timeout", "0", "true"], "--node-timeout must be above 0"),
        (
            [
                *("--restart", "group", "--max-restarts", "1"),
                *("--min-workers", "1", "true"),
            ],
            "--restart group needs all workers; drop --min-workers",
        ),
        (
            ["-n", "3", "--ps", "1", "true"],
            "-n 3 starts ranks, which have no parameter servers; got --ps 1: drop one",
        ),
        (["-np", "0", "true"], "-n/-np: must be 1 or more; got '0'"),
        (["-H", "a:2,b:2", "true"], "run tw-launch on each machine, with --nnodes N"),
        (["--hostfile", "f", "true"], "-H and --hostfile are horovodrun's"),
        (["--horovod", "--ps", "1", "true"], "--horovod has no parameter servers"),
        (
            [*SEVERAL, "--horovod", "-np", "2", "true"],
            "-n 2 counts the ranks of all machines; with --nnodes use --ps 0 --workers",
        ),
        (
            ["-n", "2", "--workers", "3", "true"],
            "-n 2 and --workers 3 differ; drop one",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_make_no_sense_are_refused(capsys, words, says):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "ps", "workers"),
    [
        (["-n", "3"], 0, 3),
        (["-np", "3"], 0, 3),
        (["-n3", "--ps", "0", "--workers", "3"], 0, 3),
        (["--mpi", "-n", "3"], 0, 3),
        (["--workers", "3"], 1, 3),
        ([], 1, 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_ranks_are_workers_without_servers(monkeypatch, words, ps, workers):
    monkeypatch.setattr(options, "_faults_of_mpi", lambda _: {})
    parsed = options.parse([*words, "--", "true", "-n", "9"])
    assert (parsed.ps, parsed.workers) == (ps, workers)
    assert parsed.command == ["true", "-n", "9"]


def test_programs_of_horovod_need_its_names(capsys, monkeypatch):
    monkeypatch.setattr(plan, "entry_points", lambda **_: [])
    assert main(["--horovod", "-np", "1", "--", "true"]) == 2
    says = "--horovod needs the package tw-horovod, which is not installed; install it"
    assert says in capsys.readouterr().err
