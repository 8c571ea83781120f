"""A change of an interface demands its file and its version, by what it breaks."""

import re

import pytest
from harness.toy_repository import WORK, ToyRepository
from interfaces.__main__ import main
from interfaces.api import check, due_version
from interfaces.manifest import find_releases, read_manifests
from interfaces.repository import Repository
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
    """A repository with tw-a 1.0.0, which is not released yet."""
    repository = ToyRepository.create(tmp_path / "toy")
    repository.package("tw-a", "1.0.0")
    return repository


def checked(repository):
    return check(repository.root, read_manifests(repository.root)["tw-a"])


@pytest.mark.slow(
    by_day=[
        *("function", "optional argument", "default's constant", "overload", "kind"),
        *("other base", "tuple's field", "frozen", "inherited method", "setter"),
    ]
)
@pytest.mark.parametrize("what", BREAKING)
def test_what_may_break_a_caller_needs_its_line_and_a_major_version(toy, what):
    before, after, is_seen_by_griffe = BREAKING[what]
    toy.write("tw-a", PREAMBLE + before)
    toy.released("tw-a", "1.0.0")
    assert checked(toy) == ""
    toy.write("tw-a", PREAMBLE + after)
    said = checked(toy)
    assert re.search(r"^[-+] \w+ tw_a\.work\b", said, re.MULTILINE)
    assert "tw-a: api.txt (-) and the code (+) differ.\nIf the code is right" in said
    toy.freeze("tw-a")
    said = checked(toy)
    assert "must be 2.0.0 or higher; got 1.0.0." in said
    assert re.search(r"^[-+] \w+ tw_a\.work\b", said, re.MULTILINE)
    assert ("griffe: `" in said) == is_seen_by_griffe
    toy.package("tw-a", "2.0.0")
    assert checked(toy) == ""
    toy.released("tw-a", "2.0.0")  # the last release counts, not the first
    assert checked(toy) == ""


INNER = "def inner(a: int) -> int: ...\n"
# What a face has -> the least version after 1.0.0, and after 1.0.0rc1.
CHANGES = {
    "front, more": ("__init__", WORK + "def more(): ...\n", "1.1.0"),
    "internal, gone": ("internal", "", "1.1.0"),
    "internal, changed": ("internal", INNER.replace("int", "str"), "1.1.0"),
    "internal, more": ("internal", INNER + "def more(): ...\n", "1.0.1"),
}


@pytest.mark.parametrize("last", ["1.0.0", "1.0.0rc1"])
@pytest.mark.parametrize("what", CHANGES)
def test_internal_has_a_file_and_a_promise_of_its_own(toy, what, last):
    face, source, due = CHANGES[what]
    toy.write("tw-a", INNER, "internal")
    toy.released("tw-a", last)
    front, internal = (
        (toy.root / "packages" / "tw-a" / name).read_text().splitlines()
        for name in ("api.txt", "internal.txt")
    )
    assert front[2:] == ["module tw_a", "def tw_a.work(size: int = 1) -> int"]
    line = "def tw_a.internal.inner(a: int) -> int"
    assert internal[2:] == ["module tw_a.internal", line]
    toy.write("tw-a", source, face)
    file = "api.txt" if face == "__init__" else "internal.txt"
    assert f"tw-a: {file} (-) and the code (+) differ." in checked(toy)
    toy.freeze("tw-a")
    due = due if last == "1.0.0" else "1.0.0rc2"
    assert f"must be {due} or higher; got {last}." in checked(toy)
    toy.package("tw-a", due)
    assert checked(toy) == ""


@pytest.mark.parametrize("kind", ["shallow clone", "archive in another"])
def test_without_history_the_files_alone_are_compared(toy, tmp_path, kind, capsys):
    toy.freeze("tw-a")
    assert checked(toy) == ""
    assert "tw-a: no earlier release to compare with." in capsys.readouterr().out
    toy.released("tw-a", "1.0.0")
    toy.commit()
    copy = ToyRepository(ToyRepository.create(tmp_path / "another").root / "copy")
    if kind == "shallow clone":
        toy.git("clone", "--quiet", "--depth", "1", toy.root.as_uri(), copy.root)
    else:
        toy.export("HEAD", copy.root)
    assert checked(copy) == ""
    said = capsys.readouterr().out
    assert said.startswith("tw-a: NOT compared with a release: ")
    assert "git fetch --unshallow" in said or "not a git repository" in said
    copy.write("tw-a", WORK.replace("= 1", "= 2"))
    assert "the code (+) differ" in checked(copy)


def test_the_command_fails_where_the_check_does(toy, monkeypatch, capsys):
    toy.released("tw-a", "1.0.0")
    monkeypatch.setenv("GIT_DIR", str(toy.root.parent))  # as a hook has it
    monkeypatch.chdir(toy.root)
    assert main(["api"]) == 0
    assert "compared with tw-a 1.0.0" in capsys.readouterr().out
    toy.write("tw-a", "")
    assert main(["api", "tw-a", "--write"]) == 1  # as no version suits it
    assert "must be 2.0.0" in capsys.readouterr().err
    assert main(["api", "tw-a", "tw-x"]) == 1
    assert "got ['tw-x']; wanted some of tw-a." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("last", "front", "internal", "due"),
    [
        ("0.1.4", [], [], "0.1.4"),
        ("0.1.4", ["+ a"], ["+ b"], "0.1.5"),
        ("0.1.4", ["- a", "+ b"], [], "0.2.0"),
        ("0.1.4", [], ["griffe: a"], "0.2.0"),
        ("1.2.3", ["+ a"], [], "1.3.0"),
        ("1.2.3", ["- a"], ["- a"], "2.0.0"),
        ("2.0.0rc1", [], [], "2.0.0rc1"),
        ("2.0.0rc9", ["- a", "+ b"], [], "2.0.0rc10"),
    ],
)
def test_the_change_says_which_version_is_due(last, front, internal, due):
    assert due_version(Version(last), front, internal) == Version(due)


def test_a_release_is_the_commit_of_its_tag_or_the_first_that_dates_it(toy):
    def commits():
        return [one.commit for one in find_releases(toy, "tw-a")]

    first = toy.released("tw-a", "1.0.0")
    changelog = toy.package("tw-a", "1.0.1") / "CHANGELOG.md"
    text = changelog.read_text()
    changelog.write_text(text.replace("## 1.0.0", "## 1.0.1 (unreleased)\n\n## 1.0.0"))
    toy.commit()
    changelog.write_text(text)
    second = toy.released("tw-a", "1.0.1")
    older = toy.released("tw-a", "0.0.9")  # a fix of what came before
    toy.git("checkout", "--quiet", "-b", "side")
    merged = toy.released("tw-a", "1.1.0")
    toy.git("checkout", "--quiet", "main")
    toy.commit()
    toy.git("merge", "--quiet", "--no-ff", "-m", "Merge", "side")
    assert commits() == [older, first, second, merged]
    tagged = toy.commit()
    toy.git("tag", "--annotate", "-m", "1.1.0", "tw-a-v1.1.0", tagged)
    assert commits() == [older, first, second, tagged]
    shallow = toy.root.parent / "shallow"
    toy.git("clone", "--quiet", "--depth", "1", toy.root.as_uri(), shallow)
    with pytest.raises(RuntimeError, match="this clone is shallow"):
        find_releases(Repository(shallow), "tw-a")
