"""What stands against a release is told before it is made."""

import pytest
from harness.toy_repository import WORK, ToyRepository
from interfaces.release import run


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


@pytest.mark.parametrize(
    ("spoil", "words", "said"),
    [
        (leave_changes, "all", r"must be clean; got the changes\n\?\? new\.txt"),
        (print, "tw-a tw-x", r"\['tw-x'\] are unknown; .* tw-a, tw-b, or all"),
        (take_fragment_away, "tw-a", r"tw-a: changelog\.d is empty"),
        (rename_argument, "all", r"the code \(\+\) differ"),
        (print, "tw-b", r"tw-b: no release satisfies tw-a<0\.2,>=0\.1; release"),
        (release, "all", r"tw-a: 0\.1\.0 is already released; raise it"),
    ],
)
def test_what_stands_against_a_release_is_told(toy, spoil, words, said):
    spoil(toy)
    with pytest.raises(ValueError, match=said):
        run(toy.root, words.split())


def test_what_may_be_released_is_named_after_what_it_needs(toy, capsys):
    run(toy.root, ["tw-b", "tw-a"])
    said = capsys.readouterr().out
    assert said.endswith("release tw-a 0.1.0\nrelease tw-b 0.1.0\n")
    release(toy)
    run(toy.root, ["tw-b"])
