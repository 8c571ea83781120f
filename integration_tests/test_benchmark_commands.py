"""Every benchmark answers help and wrong options without importing TensorFlow."""

import importlib.util
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from harness.processes import Program, wait_until

PATH = Path(__file__).parent / "lab" / "benchmarks" / "run.py"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
PICTURE = PAGE.parent / "pictures" / "benchmarks.svg"


def load(path):
    spec = importlib.util.spec_from_file_location(f"a_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for it
    spec.loader.exec_module(module)
    return module


run = load(PATH)


@pytest.fixture(autouse=True)
def without_tensorflow(monkeypatch):
    for name in ("tensorflow", "keras", "numpy", "tw_core"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("name", run.names())
def test_a_benchmark_lists_its_options(name, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        run.main([name, "--help"])
    shown = capsys.readouterr().out
    assert all(
        f"--{option.replace('_', '-')} " in shown
        for option in run.parse(name, []).__dict__
    )


def test_the_picture_has_the_figures_of_the_page(tmp_path):
    pictures, text = load(PICTURE.with_suffix(".py")), PAGE.read_text("utf-8")
    rows = pictures.read_rows(text)
    table = text.partition("## ")[0]
    assert len(rows) == table.count("\n| ") - 1 > 15  # without its head
    assert sum(row.missed for row in rows) == table.count(" (missed) |") > 0
    pictures.draw(rows, tmp_path / "again.svg")
    again = (tmp_path / "again.svg").read_text("utf-8")
    assert PICTURE.read_text("utf-8") == again, f"run {PICTURE.with_suffix('.py')}"


def test_the_page_lists_every_benchmark():
    table = PAGE.read_text().partition("| name | races |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert sorted(re.findall(r"`(\w+)`", "".join(cells))) == run.names()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["step", "--groups", "nobody"], "invalid choice: 'nobody'"),
        (["fit", "--works", "nothing"], "choose from 'small', 'wide', 'convolutional'"),
        (["rlload_profile", "--works", "nothing"], "'vectors', 'vectors-mlp'"),
        (["reduce", "--towers", "two"], "invalid int value: 'two'"),
        (["build", "--only", "graph"], "unrecognized arguments: --only"),
    ],
)
def test_a_wrong_option_is_refused(arguments, says, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        run.main(arguments)
    assert says in capsys.readouterr().err


def test_a_benchmark_that_there_is_not_is_refused_with_those_that_there_are(capsys):
    with pytest.raises(SystemExit, match=r"name a benchmark, one of .*'allreduce'"):
        run.main(["nothing"])
    run.main(["--help"])
    assert "timeline" in capsys.readouterr().out


def test_choices_are_the_names_of_the_works_and_the_first_default():
    assert run.parse("fit", []).works == ["small", "wide", "convolutional"]
    assert run.parse("rlload_profile", []).works == ["vectors-mlp"]
    assert run.parse("calls", ["--workers", "--timed-steps", "3"]).timed_steps == 3
    assert run.parse("calls", ["--workers"]).workers == []


def test_ctrl_c_ends_a_benchmark_as_a_shell_expects(tmp_path):
    command = [sys.executable, str(PATH), "timeline"]
    with Program(command, cwd=tmp_path, is_apart=True) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_until(lambda: "numpy" in maps.read_text())
        os.killpg(process.pid, signal.SIGINT)
        status, said = process.finish(), process.err
    assert status == 130, said
    assert said.endswith("run.py: interrupted; no report was written\n")
