"""What runs a README's examples fails when it should."""

import sys

from interfaces import pieces


def test_an_example_that_fails_or_is_missing_is_a_fault(tmp_path, capfd):
    readme = tmp_path / "README.md"
    readme.write_text("# Nothing\n")
    assert pieces.main([str(readme)]) == 1
    assert "has no block ```python to run" in capfd.readouterr().err
    readme.write_text("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n")
    assert pieces.main([str(readme)]) == 1
    assert "NameError: name 'x' is not defined" in capfd.readouterr().err
    readme.write_text("```python\nx = 1\n```\n")
    assert pieces.main([str(readme)]) == 0


def test_a_readme_has_all_programs_that_it_launches_launched(tmp_path):
    readme = tmp_path / "README.md"
    one, two = "# one.py\nx = 1\n", "# two.py\nx = 2\n"
    launch = "    tw-launch --ps 1 -- python one.py\n    tw-launch -- python two.py\n"
    readme.write_text(f"{launch}\n```python\n{one}```\n\n```python\n{two}```\n")
    first, second = pieces.commands(readme, tmp_path)
    assert first[3:] == ["--ps", "1", "--", sys.executable, "one.py"]
    assert second[3:] == ["--", sys.executable, "two.py"]
    assert [(tmp_path / f"{n}.py").read_text() for n in ("one", "two")] == [one, two]
