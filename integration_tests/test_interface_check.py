"""A change of an interface demands its file and its version, by what it breaks."""

import re

import pytest
from interfaces.__main__ import main
from interfaces.api import check, due_version
from interfaces.manifest import read_manifests
from interfaces.toy_repository import WORK, ToyRepository
from packaging.version import Version

PREAMBLE = """
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, overload
"""
OVERLOADS = "@overload\ndef work(a: {}): ...\n@overload\ndef work(a: str): ...\n"
OVERLOADS += "def work(a): ..."
SETTER = " @f.setter\n def f(self, v): ..."
PROPERTY = "class work:\n @property\n def f(self): ...\n{}"
DATA = "@dataclass{}\nclass work:\n a: int\n{}"
TUPLE = "class work(NamedTuple):\n a: int\n{}"
# What changes -> before, after, and whether griffe, too, calls it breaking.
BREAKING = {
    "function": (WORK, "", True),
    "required argument": ("def work(a=1): ...", "def work(b, a=1): ...", True),
    "optional argument": ("def work(a=1): ...", "def work(a=1, b=2): ...", False),
    "keyword": ("def work(size=1): ...", "def work(count=1): ...", True),
    "default": ("def work(a=1): ...", "def work(a=2): ...", True),
    "default's constant": ("L=1\ndef work(a=L): ...", "L=2\ndef work(a=L): ...", False),
    "argument's type": ("def work(a: int): ...", "def work(a: str): ...", False),
    "returned type": ("def work() -> int: ...", "def work() -> float: ...", False),
    "overload": (OVERLOADS.format("int"), OVERLOADS.format("bytes"), False),
    "kind": ("def work(): ...", "class work: ...", True),
    "value": ("work = 3", "work = 4", False),
    "alias": ("work: TypeAlias = 'int'", "work: TypeAlias = 'str'", False),
    "other base": ("class work(ValueError): ...", "class work(KeyError): ...", False),
    "field": (DATA.format("", ""), DATA.format("", " b: int"), True),
    "tuple's field": (TUPLE.format(""), TUPLE.format(" b: int"), False),
    "frozen": (DATA.format("(frozen=True)", ""), DATA.format("", ""), False),
    "inherited method": (
        "class _B:\n def f(self): ...\nclass work(_B): ...",
        "class _B: ...\nclass work(_B): ...",
        True,
    ),
    "setter": (PROPERTY.format(SETTER), PROPERTY.format(""), False),
}


@pytest.fixture
def toy(tmp_path):
    """A repository with tw-a 0.1.0, which is not released yet."""
    repository = ToyRepository.create(tmp_path / "toy")
    repository.package("tw-a", "0.1.0")
    return repository


def checked(repository):
    manifest = read_manifests(repository.root)["tw-a"]
    return check(repository.root, manifest)


def change(repository, before, after):
    """Releases ``before`` as tw-a 0.1.0; returns what is said of ``after``."""
    repository.write_work("tw-a", PREAMBLE + before)
    repository.released("tw-a", "0.1.0")
    assert checked(repository) == ""
    repository.write_work("tw-a", PREAMBLE + after)
    said = checked(repository)
    repository.freeze("tw-a")
    return said


@pytest.mark.parametrize("what", BREAKING)
def test_what_may_break_a_caller_needs_its_line_and_a_minor_version(toy, what):
    before, after, is_seen_by_griffe = BREAKING[what]
    said = change(toy, before, after)
    assert re.search(r"^[-+] \w+ tw_a\.work\b", said, re.MULTILINE)
    assert "tw-a: api.txt (-) and the code (+) differ" in said
    assert 'nox -s "api(tw-a)" -- --write' in said
    for low in ("0.1.0", "0.1.1"):
        toy.package("tw-a", low)
        said = checked(toy)
        assert f"must be 0.2.0 or higher; got {low}." in said
        assert re.search(r"^[-+] \w+ tw_a\.work\b", said, re.MULTILINE)
        assert ("griffe: `" in said) == is_seen_by_griffe
        toy.commit("Change")
    toy.package("tw-a", "0.2.0")
    assert checked(toy) == ""
    toy.released("tw-a", "0.2.0")  # the last release counts, not the first
    assert checked(toy) == ""


def test_an_addition_needs_its_line_and_a_patch_version(toy):
    said = change(toy, WORK, WORK + "\n\ndef more() -> None: ...\n")
    assert "+ def tw_a.more() -> None\ntw-a: api.txt (-) and the code (+)" in said
    assert "must be 0.1.1 or higher; got 0.1.0." in checked(toy)
    toy.package("tw-a", "0.1.1")
    assert checked(toy) == ""


def test_without_an_earlier_release_there_is_nothing_to_compare(toy, capsys):
    toy.freeze("tw-a")
    assert checked(toy) == ""
    assert "tw-a: no earlier release to compare with." in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["shallow clone", "archive", "archive in another"])
def test_without_history_the_file_alone_is_compared(toy, tmp_path, kind, capsys):
    toy.released("tw-a", "0.1.0")
    toy.commit("Later")
    outer = tmp_path
    if "in another" in kind:
        outer = ToyRepository.create(tmp_path / "another").root
    copy = ToyRepository(outer / "copy")
    if "archive" in kind:
        toy.export("HEAD", copy.root)
    else:
        toy.git("clone", "--quiet", "--depth", "1", toy.root.as_uri(), copy.root)
    assert checked(copy) == ""
    said = capsys.readouterr().out
    assert said.startswith("tw-a: NOT compared with a release: ")
    assert "git fetch --unshallow" in said or "not a git repository" in said
    copy.write_work("tw-a", WORK.replace("= 1", "= 2"))
    assert "the code (+) differ" in checked(copy)


def test_the_command_fails_where_the_check_does(toy, monkeypatch, capsys):
    toy.released("tw-a", "0.1.0")
    monkeypatch.chdir(toy.root)
    assert main(["api", "tw-a"]) == 0
    assert "compared with tw-a 0.1.0" in capsys.readouterr().out
    toy.write_work("tw-a", "")
    assert main(["api", "tw-a"]) == 1
    assert "the code (+) differ" in capsys.readouterr().err
    assert main(["api", "tw-a", "--write"]) == 1  # as no version suits it
    assert "must be 0.2.0" in capsys.readouterr().err
    assert main(["api", "tw-x"]) == 1
    assert "got 'tw-x'; wanted one of tw-a." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("last", "change", "due"),
    [
        ("0.1.4", [], "0.1.4"),
        ("0.1.4", ["+ a"], "0.1.5"),
        ("0.1.4", ["- a", "+ b"], "0.2.0"),
        ("0.1.4", ["griffe: a"], "0.2.0"),
        ("1.2.3", ["+ a"], "1.2.4"),
        ("1.2.3", ["- a"], "2.0.0"),
        ("2.0.0rc1", [], "2.0.0rc1"),
        ("2.0.0rc1", ["+ a"], "2.0.0rc2"),
        ("2.0.0rc9", ["- a", "+ b"], "2.0.0rc10"),
    ],
)
def test_the_change_says_which_version_is_due(last, change, due):
    assert due_version(Version(last), change) == Version(due)
