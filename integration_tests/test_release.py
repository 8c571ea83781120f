"""What stands against a release is told before it is made."""

import shutil

import pytest
from harness.docs_blocks import ROOT
from harness.toy_repository import WORK, ToyRepository
from interfaces.__main__ import main
from interfaces.manifest import find_manifests, raise_all
from interfaces.release import run
from packaging.version import Version
from structure.limits import find_wrong_bounds


@pytest.fixture
def toy(tmp_path):
    """Has tw-a and tw-b, which needs it, both to be released for the first time."""
    repository = ToyRepository.create(tmp_path / "toy")
    for name, needs in (("tw-a", []), ("tw-b", ["tw-a>=0.1,<0.2"])):
        folder = repository.package(name, "0.1.0", needs)
        repository.freeze(name)
        (folder / "changelog.d" / "+toy.added.md").write_text(f"What {name} does.\n")
    repository.commit()
    return repository


def leave_changes(toy):
    (toy.root / "new.txt").write_text("x")


def rename_argument(toy):
    toy.write("tw-a", WORK.replace("size", "count"))
    toy.commit()


def take_fragment_away(toy):
    (toy.root / "packages" / "tw-a" / "changelog.d" / "+toy.added.md").unlink()
    toy.commit()


def release(toy):
    toy.released("tw-a", "0.1.0")


def ask_for_a_later_extra(toy):
    toy.package("tw-b", "0.1.0", ["tw-a>=0.1,<0.2"], ["tw-a>=0.3", "numpy"])
    toy.commit()


@pytest.mark.parametrize(
    ("spoil", "words", "said"),
    [
        (leave_changes, "all", r"must be clean; got the changes\n\?\? new\.txt"),
        (print, "tw-a tw-x", r"\['tw-x'\] are unknown; .* tw-a, tw-b, or all"),
        (take_fragment_away, "tw-a", r"tw-a: changelog\.d is empty"),
        (rename_argument, "all", r"the code \(\+\) differ"),
        (print, "tw-b", r"tw-b: no release satisfies tw-a<0\.2,>=0\.1; release"),
        (
            ask_for_a_later_extra,
            "all",
            r"tw-b: no release satisfies tw-a>=0\.3; release",
        ),
        (release, "all", r"tw-a: 0\.1\.0 is already released; raise it"),
        (release, "all 0.0.9", r"tw-a.*must be 0\.1\.0 or higher; got 0\.0\.9"),
        (print, "all tw-b", r"Invalid version: 'tw-b'"),
    ],
)
def test_what_stands_against_a_release_is_told(toy, spoil, words, said):
    spoil(toy)
    before = toy.git("status", "--porcelain")
    with pytest.raises(ValueError, match=f"(?s){said}"):
        run(toy.root, words.split())
    assert toy.git("status", "--porcelain") == before


def test_what_may_be_released_is_named_after_what_it_needs(toy, capsys):
    run(toy.root, ["tw-b", "tw-a"])
    said = capsys.readouterr().out
    assert said.endswith("release tw-a 0.1.0\nrelease tw-b 0.1.0\n")
    release(toy)
    run(toy.root, ["tw-b"])


@pytest.mark.parametrize("earlier", [False, True])
def test_all_packages_get_one_version_and_a_line_in_their_changelogs(
    toy, capsys, monkeypatch, earlier
):
    release(toy)
    if earlier:  # where a change needs it
        monkeypatch.chdir(toy.root)
        assert main(["api", "--version", "0.2.0"]) == 0
        toy.commit()
    run(toy.root, ["all", *["0.2.0"] * (not earlier)])
    said = capsys.readouterr().out
    assert said.endswith("release tw-a 0.2.0\nrelease tw-b 0.2.0\n")
    manifests = find_manifests(toy.root)
    assert [str(one.version) for one in manifests.values()] == ["0.2.0"] * 2
    [need] = manifests["tw-b"].siblings
    assert str(need) == "tw-a<0.3,>=0.2.0"
    told = toy.root / "packages" / "tw-a" / "changelog.d" / "+all.changed.md"
    assert "version 0.2.0" in told.read_text()


@pytest.mark.slow(by_day=["1.1.0", "2.0.0"])
@pytest.mark.parametrize("version", ["1.0.0", "1.1.0", "1.1.0rc1", "2.0.0"])
def test_bounds_of_a_new_version_agree_with_what_these_packages_import(
    tmp_path, version
):
    ignored = shutil.ignore_patterns("__pycache__", "tests")
    shutil.copytree(ROOT / "packages", tmp_path / "packages", ignore=ignored)
    raise_all(tmp_path, Version(version))
    assert list(find_wrong_bounds(tmp_path)) == []
    manifests = find_manifests(tmp_path)
    assert {one.version for one in manifests.values()} == {Version(version)}
    needs = [need for one in manifests.values() for need in one.siblings]
    assert len(needs) >= 20
    for need in needs:
        assert need.specifier.contains(version, prereleases=True)
        assert str(need.specifier).endswith(f">={version}")
