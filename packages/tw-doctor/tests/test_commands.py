"""Commands that other packages declare."""

import subprocess
import sys

import pytest

from tw_doctor._machine import command

MODULE = "def run(arguments):\n    print(arguments)\n    return 3\n"
POINTS = "[tw_doctor.commands]\nelsewhere = own_commands:run\n"


def test_a_command_of_another_package_gets_its_arguments(tmp_path):
    (tmp_path / "own_commands.py").write_text(MODULE)
    declared = tmp_path / "own-1.dist-info"
    declared.mkdir()
    (declared / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1\n")
    (declared / "entry_points.txt").write_text(POINTS)
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    start = f"{path}; import tw_doctor; sys.exit(tw_doctor.main())"
    done = subprocess.run(
        [sys.executable, "-c", start, "elsewhere", "a:b", "--towers", "2"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout == "['a:b', '--towers', '2']\n"


def test_a_command_of_a_missing_package_names_it(monkeypatch, capsys):
    monkeypatch.setattr(command, "entry_points", lambda **_: ())
    assert command.main(["model", "train:make_model"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "tw-doctor: the command model is a part of tw-keras, which is not installed.\n"
    )


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        command.main(["mode", "train:make_model"])
    assert end.value.code == 2
    assert "unrecognized arguments: mode" in capsys.readouterr().err
