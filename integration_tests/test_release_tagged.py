"""What is published is what the tag names, and a tag that says otherwise is refused."""

import pytest
from interfaces.release import ARCHIVES
from interfaces.repository import Repository, build
from interfaces.tagged import build_tagged, check_tag
from interfaces.toy_repository import ToyRepository

TAG = "tw-a-v0.1.0"


@pytest.fixture
def toy(tmp_path):
    """Has a release of tw-a, tagged."""
    repository = ToyRepository.create(tmp_path / "toy")
    (repository.root / ".gitignore").write_text("out/\n")
    repository.released("tw-a", "0.1.0")
    repository.git("tag", TAG)
    return repository


def test_the_archives_are_those_of_the_tagged_commit(toy, tmp_path):
    (toy.root / ARCHIVES / "tw-a").mkdir(parents=True)
    (toy.root / ARCHIVES / "tw-a" / "old.whl").write_text("of a run before")
    folder = build_tagged(toy.root, TAG)
    assert folder == toy.root / ARCHIVES / "tw-a"
    names = ["tw_a-0.1.0-py3-none-any.whl", "tw_a-0.1.0.tar.gz"]
    assert sorted(path.name for path in folder.iterdir()) == names
    exported = Repository(toy.root).export(TAG, tmp_path / "again")
    epoch = toy.git("log", "-1", "--format=%ct", TAG)
    build(exported / "packages" / "tw-a", tmp_path / "built", epoch=epoch)
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "built" / name).read_bytes()


def work_on(toy):
    toy.commit("Work on")


def raise_version(toy):
    toy.package("tw-a", "0.2.0")


def forget_section(toy):
    (toy.root / "packages" / "tw-a" / "CHANGELOG.md").write_text("# Changelog\n")


def leave_fragment(toy):
    toy.fragment("tw-a", "What the changelog lacks.")


def change_interface(toy):
    toy.write_work("tw-a", "def more() -> int:\n    return 1\n")


@pytest.mark.parametrize(
    ("spoil", "tag", "said"),
    [
        (print, "v0.1.0", r"got the tag 'v0\.1\.0'; wanted one such as tw-a-v0\.1\.0"),
        (print, "tw-x-v0.1.0", r"got the tag 'tw-x-v0\.1\.0'"),
        (print, "tw-a-v0.1.1", r"pyproject\.toml says 0\.1\.0\.(?s:.)*no such tag"),
        (work_on, TAG, r"it names [0-9a-f]{9}; checked out is [0-9a-f]{9}\."),
        (raise_version, TAG, r"pyproject\.toml says 0\.2\.0\.(?s:.)*only for 0\.1\.0"),
        (forget_section, TAG, r"no dated section for 0\.1\.0, only for none"),
        (leave_fragment, TAG, r"changelog\.d holds \['\+toy\.added\.md'\]"),
        (change_interface, TAG, r"api\.txt \(-\) and the code \(\+\) differ"),
    ],
)
def test_a_tag_that_does_not_agree_with_the_files_is_refused(toy, spoil, tag, said):
    spoil(toy)
    with pytest.raises(ValueError, match=said):
        check_tag(toy, tag)
