"""The check of single packages fails when it should."""

import json
import subprocess
import sys
from functools import partial
from importlib.metadata import distributions

import pytest
from interfaces import pieces


@pytest.mark.parametrize(
    ("answer", "faults"),
    [
        ([0.02, False], []),
        ([0.5, False], ["tw_core takes 0.500 s to import; the limit is 0.1 s."]),
        ([0.02, True], ["importing tw_core imports TensorFlow."]),
    ],
)
def test_a_slow_import_and_one_of_tensorflow_are_faults(monkeypatch, answer, faults):
    said = json.dumps(answer)
    monkeypatch.setattr(subprocess, "check_output", lambda command: said)
    assert pieces.check_import("tw_core") == faults


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Has exactly the named packages installed, from a file or from an index."""

    def leave(name, *, from_file=True):
        folder = tmp_path / f"{name.replace('-', '_')}-0.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\n")
        if from_file:
            (folder / "direct_url.json").write_text('{"url": "file:///x.whl"}')

    found = partial(distributions, path=[str(tmp_path)])
    monkeypatch.setattr(pieces, "distributions", found)
    return leave


def test_what_is_there_beside_or_missing_or_of_an_index_is_a_fault(install):
    install("tw-core")
    install("numpy", from_file=False)
    assert pieces.check_installed(["tw-core"]) == []
    [fault] = pieces.check_installed(["tw-core", "tw-lost"])
    assert "must hold exactly ['tw-core', 'tw-lost']; got ['tw-core']." in fault
    [fault] = pieces.check_installed([])
    assert "must hold exactly []; got ['tw-core']." in fault
    install("tw-reduce", from_file=False)
    [fault] = pieces.check_installed(["tw-core", "tw-reduce"])
    assert "an index was asked for ['tw-reduce']; name their files" in fault


def test_an_example_that_fails_or_is_missing_is_a_fault(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("# Nothing\n")
    [fault] = pieces.check_example(readme)
    assert "must have an example" in fault
    readme.write_text("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n")
    [fault] = pieces.check_example(readme)
    assert "NameError: name 'x' is not defined" in fault
    readme.write_text("```python\nx = 1\n```\n")
    assert pieces.check_example(readme) == []


def test_a_readme_has_all_programs_that_it_launches_launched(tmp_path):
    readme = tmp_path / "README.md"
    one, two = "x = 1\n", "# two.py\nx = 2\n"
    launch = "    tw-launch --ps 1 -- python one.py\n"
    readme.write_text(f"{launch}\n```python\n{one}```\n")
    [command] = pieces.example_commands(readme, tmp_path)
    assert command[1:] == [
        *("-m", "tw_syncrep.launch", "--ps", "1"),
        *("--", sys.executable, "one.py"),
    ]
    assert (tmp_path / "one.py").read_text() == one
    text = f"{launch}    tw-launch -- python two.py\n```python\n# one.py\n{one}```\n"
    readme.write_text(f"{text}\n```python\n{two}```\n")
    commands = pieces.example_commands(readme, tmp_path)
    assert [command[-1] for command in commands] == ["one.py", "two.py"]
    assert (tmp_path / "two.py").read_text() == two
