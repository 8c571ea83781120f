"""Every code block of the READMEs and pages runs, with the wheels users install."""

import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from harness.docs_blocks import (
    PAGES,
    READMES,
    ROOT,
    blocks,
    files,
    launches,
    name,
    python_blocks,
)
from harness.launching import run_forked, run_to_its_end

RUNNER = Path(__file__).parent / "programs" / "docs_runner.py"
PAGES_DEADLINE_S = 900
LAUNCH_DEADLINE_S = 150
TRIES = 3  # of a peer's program
CPUS = re.compile(r"use_logical_cpus\((\d+)\)")
OURS = re.compile(r"^(?:from|import) (?:tw_|horovod)", re.MULTILINE)
SYNC_REPLICAS = ROOT / "docs" / "migration" / "sync_replicas_optimizer.md"
STARTED_AFRESH = ROOT / "packages" / "tw-syncrep" / "README.md"
LAUNCHED = [path for path in (*READMES, *PAGES) if launches(path)]
RUN = [
    path for path in (*READMES, *PAGES) if python_blocks(path) and path not in LAUNCHED
]
# Of these every change runs all.
FIRST = {
    *READMES,
    *(ROOT / "docs" / "howto" / f"{x}.md" for x in ("keras", "builders")),
}
# What the README's change leaves out, and what it must not change.
CHANGE = """
import keras, numpy as np
from tw_core import use_logical_cpus
use_logical_cpus(2)
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
x = np.random.default_rng(0).normal(size=[99, 3])
y = x @ [[1.0], [2.0], [3.0]]
def make_model():
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
keras.utils.set_random_seed(0)
{before}
wanted, one = model.get_weights(), model
keras.utils.set_random_seed(0)
{after}
np.testing.assert_allclose(model.get_weights()[0], wanted[0], rtol=1e-12)
assert model is not one and len(model.towers) == 2
"""
WEIGHTS = f"w = {[0.5 + 0.5 * 0.75**4] * 3}"  # as the page works out by hand


def num_cpus(path):
    counts = {int(count) for count in CPUS.findall(path.read_text())}
    assert len(counts) <= 1, f"{path}: one process cannot have {counts} logical CPUs"
    return counts.pop() if counts else 1


def in_one_process():
    """Groups pages by their number of logical CPUs, the first that one reads apart."""
    groups = defaultdict(list)
    for path in RUN:
        groups[f"{'first' if path in FIRST else 'later'}-{num_cpus(path)}"].append(path)
    return groups


GROUPS = in_one_process()


@pytest.mark.slow(by_day=[group for group in GROUPS if "first" in group])
@pytest.mark.timeout(PAGES_DEADLINE_S + 60)
@pytest.mark.parametrize("group", GROUPS)
def test_the_code_of_pages_runs_with_their_number_of_logical_cpus(group, tmp_path):
    status, said = run_pages(GROUPS[group], tmp_path)
    assert status == 0, said


def run_pages(pages, folder):
    command = [sys.executable, str(RUNNER), *map(str, pages)]
    return run_forked(command, deadline_s=PAGES_DEADLINE_S, cwd=folder)


@pytest.mark.slow
def test_a_block_that_fails_is_told_with_its_line(tmp_path):
    blocks = ("# file.py\nlost\n", "here = 1\n", "print(here)\nprint(lost)\n")
    page = tmp_path / "page.md"
    page.write_text("".join(f"```python\n{code}```\n" for code in blocks))
    status, said = run_pages([page], tmp_path)
    assert status == 1
    assert "page.md:10: NameError" in said
    assert "1 failed, 2 passed" in said


def with_time(path):
    """Marks a page with as long as its launches may take together."""
    limit_s = len(launches(path)) * LAUNCH_DEADLINE_S + 60
    return pytest.param(path, id=name(path), marks=pytest.mark.timeout(limit_s))


@pytest.mark.slow(by_day=[name(path) for path in LAUNCHED if path in FIRST])
@pytest.mark.parametrize(
    "path", [with_time(path) for path in LAUNCHED if path != SYNC_REPLICAS]
)
def test_the_programs_of_a_page_run_in_the_cluster_that_it_starts(path, tmp_path):
    ours = launches_of_ours(path, tmp_path)
    assert ours
    run = run_to_its_end if path == STARTED_AFRESH else run_forked
    for launch in ours:
        status, said = launched(launch, tmp_path, run)
        assert status == 0, said


@pytest.mark.parametrize("path", LAUNCHED, ids=name)
def test_every_block_of_a_page_that_launches_is_a_program(path):
    assert len(files(path)) == len(python_blocks(path))


@pytest.mark.slow
@pytest.mark.timeout((TRIES + 1) * LAUNCH_DEADLINE_S + 60)
def test_sync_replicas_programs_print_the_same_before_and_after(tmp_path):
    (after,) = launches_of_ours(SYNC_REPLICAS, tmp_path)
    (before,) = set(launches(SYNC_REPLICAS)) - {after}
    status, said = launched(after, tmp_path)
    assert (status, re.findall(r"w = .*", said)) == (0, [WEIGHTS]), said
    # A replica of TensorFlow's class may fill two slots of a step, or wait forever.
    heard = []
    while len(heard) < TRIES and WEIGHTS not in "".join(heard[-1:]):
        heard.append(launched(before, tmp_path)[1])
    assert re.findall(r"w = .*", heard[-1]) == [WEIGHTS], heard


def launches_of_ours(path, folder):
    """Writes a page's programs, and lists the launches of those that are ours."""
    programs = files(path)
    for file_name, code in programs.items():
        (folder / file_name).write_text(code)
    listed = launches(path)
    assert {launch.file_name for launch in listed} == programs.keys()
    return [one for one in listed if OURS.search(programs[one.file_name])]


def launched(launch, folder, run=run_forked):
    """Runs a launch line; returns its status, negative if killed, and what was said."""
    return run(launch.command, deadline_s=LAUNCH_DEADLINE_S, cwd=folder)


@pytest.mark.slow(by_day=True)
@pytest.mark.timeout(LAUNCH_DEADLINE_S + 60)
def test_the_change_that_the_readme_begins_with_keeps_the_weights(tmp_path):
    (change,) = [block.code for block in blocks(READMES[0]) if block.info == "diff"]
    on_gpus, on_cpus = [f"TowerModel(make_model{d})" for d in ("", ", ['/cpu:0'] * 2")]
    assert change.count(on_gpus) == 1
    lines = change.replace(on_gpus, on_cpus).splitlines()
    before, after = (
        "\n".join(line[1:] for line in lines if not line.startswith(other))
        for other in "+-"
    )
    program = tmp_path / "change.py"
    program.write_text(CHANGE.format(before=before, after=after))
    command = [sys.executable, str(program)]
    status, said = run_forked(command, deadline_s=LAUNCH_DEADLINE_S, cwd=tmp_path)
    assert status == 0, said


@pytest.mark.parametrize("path", READMES, ids=name)
def test_every_readme_has_an_example(path):
    assert python_blocks(path)


@pytest.mark.parametrize("path", [*READMES, *PAGES], ids=name)
def test_only_a_migration_guide_shows_code_that_is_not_run(path):
    unknown = {"python3", "py", "pycon", "Python"}
    wrong = [block.line for block in blocks(path) if block.info in unknown]
    assert not wrong, f"{path}: python blocks say ```python; see lines {wrong}"
    shown = [b for b in blocks(path) if b.info.startswith("{code-block}")]
    assert all(block.is_before for block in shown), [b.line for b in shown]
    assert not shown or path.parent.name == "migration"


def test_the_test_command_of_the_readme_is_what_ci_runs():
    commands = re.findall(r"^```sh\n(.*?)\n```$", READMES[0].read_text(), re.MULTILINE)
    train, test = [command for command in commands if "nox" in command]
    assert train == f"{test} -s train"
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in ci if "nox" in line] == [test]
    for command in (train, test):
        assert not command.startswith(("$", "%", ">"))
        assert "\n" not in command
