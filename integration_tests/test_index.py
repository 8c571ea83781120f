"""What an index shows of a package leads out of it, to the files of its release."""

import re
import tarfile
from collections import Counter
from email import message_from_bytes
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
from harness.docs_blocks import READMES, ROOT, name
from harness.toy_repository import ToyRepository
from interfaces.__main__ import main
from interfaces.index import urls, with_addresses
from interfaces.manifest import read_manifests
from interfaces.repository import build
from markdown_it import MarkdownIt

ADDRESS = "https://forge.example/own/towers"
MANIFESTS = read_manifests(ROOT)


class Page(HTMLParser):
    """The links, pictures and headings of a rendered page."""

    def __init__(self, markdown):
        super().__init__()
        self.links, self.headings = [], []
        self.feed(MarkdownIt("commonmark").enable("table").render(markdown))

    def handle_starttag(self, tag, attrs):
        self.links += [v for key, v in attrs if key in ("href", "src")]
        if re.fullmatch(r"h\d", tag):
            self.headings.append("")
            self.reads = True

    def handle_endtag(self, tag):
        if re.fullmatch(r"h\d", tag):
            self.reads = False

    def handle_data(self, data):
        if getattr(self, "reads", False):
            self.headings[-1] += data


def anchors(path):
    """The anchors that a forge gives to a page's headings."""
    seen = Counter()
    for heading in Page(path.read_text()).headings:
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        yield f"{slug}-{seen[slug]}" if seen[slug] else slug
        seen[slug] += 1


def leads(link, page):
    """Whether a link from a page of the checkout leads to a file, and a heading."""
    path, _, anchor = unquote(link).partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("path", READMES, ids=name)  # Sphinx checks the pages'
def test_the_links_of_a_readme_lead_to_files_and_their_headings(path):
    links = [link for link in Page(path.read_text()).links if "://" not in link]
    assert [link for link in links if not leads(link, path)] == []


@pytest.mark.parametrize("package", MANIFESTS)
def test_what_is_uploaded_has_no_relative_link_and_leads_to_its_tag(package):
    own = MANIFESTS[package]
    page = ROOT / own.folder / "README.md"
    before = Page(page.read_text())
    after = Page(with_addresses(ROOT, own, page.read_text(), ADDRESS))
    assert [link for link in after.links if not re.match("https://|#", link)] == []
    assert after.headings == before.headings
    assert len(after.links) == len(before.links)
    ours = [*after.links, *urls(own, ADDRESS).values()]
    tagged = re.compile(rf"{ADDRESS}/(?:blob|tree|raw)/{own.tag}/(.*)")
    found = [match[1] for link in ours if (match := tagged.fullmatch(link))]
    assert [path for path in found if not leads(path, ROOT / "README.md")] == []
    others = {link.removeprefix(ADDRESS) for link in ours if link.startswith(ADDRESS)}
    assert {link for link in others if own.tag not in link} == {"", "/issues"}


README = """\
# tw-a

See [the other](../tw-b/README.md#it), [all](..), [this](#tw-a), [Python][1], `[x](y)`:
![a picture](step.png)

```python
table = {"f": [print]}
table["f"][0]("README")
```

[1]: https://python.org
"""


@pytest.fixture
def toy(tmp_path):
    repository = ToyRepository.create(tmp_path / "toy")
    for package in ("tw-a", "tw-b"):
        repository.package(package, "0.1.0")
    folder = repository.root / "packages" / "tw-a"
    (folder / "README.md").write_text(README)
    (folder / "step.png").touch()
    return repository


def test_archives_have_the_addresses_of_their_tag(toy, tmp_path, monkeypatch):
    monkeypatch.chdir(toy.root)
    into = tmp_path / "into"
    assert main(["index", "tw-a", ADDRESS, str(into)]) == 0
    build(into, tmp_path, "--sdist")
    with tarfile.open(tmp_path / "tw_a-0.1.0.tar.gz") as archive:
        about = message_from_bytes(archive.extractfile("tw_a-0.1.0/PKG-INFO").read())
    assert f"Source, {ADDRESS}/tree/tw-a-v0.1.0/packages/tw-a" in about.get_all(
        "Project-URL"
    )
    tag = "tw-a-v0.1.0/packages"
    wanted = README.replace("../tw-b", f"{ADDRESS}/blob/{tag}/tw-b")
    wanted = wanted.replace("(..)", f"({ADDRESS}/tree/{tag})")
    wanted = wanted.replace("(step.png)", f"({ADDRESS}/raw/{tag}/tw-a/step.png)")
    assert about.get_payload() == wanted
    assert (toy.root / "packages" / "tw-a" / "README.md").read_text() == README


@pytest.mark.parametrize(
    ("address", "lost", "said"),
    [
        ("git@forge.example:own/towers", "", "address must be the repository's"),
        (f"{ADDRESS}/", "", "address must be the repository's"),
        (ADDRESS, "step.png", r"links to \['step.png'\], which do not exist"),
    ],
)
def test_a_wrong_address_and_a_lost_file_are_told(
    toy, tmp_path, monkeypatch, capsys, address, lost, said
):
    monkeypatch.chdir(toy.root)
    if lost:
        (toy.root / "packages" / "tw-a" / lost).unlink()
    assert main(["index", "tw-a", address, str(tmp_path / "into")]) == 1
    assert re.search(said, capsys.readouterr().err)
