"""Sites of several versions lie side by side, and are listed in order."""

import json
import subprocess
import sys

import pytest
from harness.docs_blocks import ROOT

PUBLISH = ROOT / "docs" / "publish.py"
VERSIONS = ROOT / "docs" / "_static" / "versions.js"


def publish(site, pages, version):
    command = [sys.executable, str(PUBLISH), str(site), str(pages), version]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def site(tmp_path):
    (tmp_path / "site" / "howto").mkdir(parents=True)
    (tmp_path / "site" / "index.html").write_text("first")
    (tmp_path / "site" / "howto" / "core.html").write_text("how")
    (tmp_path / "site" / "_static").mkdir()
    (tmp_path / "site" / "_static" / "versions.js").write_text(VERSIONS.read_text())
    return tmp_path / "site"


@pytest.fixture
def pages(tmp_path):
    (tmp_path / "pages" / ".git").mkdir(parents=True)
    return tmp_path / "pages"


def test_versions_are_listed_the_branch_first_then_the_newest_of_each_package(
    site, pages
):
    tags = ["tw-core-v0.9.0", "tw-reduce-v0.2.0", "tw-core-v0.10.0", "tw-core-v0.2.0"]
    candidates = ["tw-core-v0.10.0rc2", "tw-core-v0.10.0rc10"]
    for version in (*candidates, *tags, "main"):
        assert publish(site, pages, version).returncode == 0
    assert json.loads((pages / "versions.json").read_text()) == [
        {"folder": "main", "name": "development"},
        {"folder": "tw-core-v0.10.0", "name": "tw-core 0.10.0"},
        {"folder": "tw-core-v0.10.0rc10", "name": "tw-core 0.10.0rc10"},
        {"folder": "tw-core-v0.10.0rc2", "name": "tw-core 0.10.0rc2"},
        {"folder": "tw-core-v0.9.0", "name": "tw-core 0.9.0"},
        {"folder": "tw-core-v0.2.0", "name": "tw-core 0.2.0"},
        {"folder": "tw-reduce-v0.2.0", "name": "tw-reduce 0.2.0"},
    ]
    assert 'url=main/"' in (pages / "index.html").read_text()
    script = (pages / "main" / "_static" / "versions.js").read_text()
    assert "PUBLISHED = true;" in script  # only then is the list asked for
    assert (pages / "tw-core-v0.9.0" / "howto" / "core.html").read_text() == "how"
    assert (pages / ".git").exists()


def test_a_version_replaces_itself_and_no_other(site, pages):
    publish(site, pages, "tw-core-v0.2.0")
    publish(site, pages, "main")
    (site / "index.html").write_text("second")
    (site / "howto" / "core.html").unlink()
    assert publish(site, pages, "main").returncode == 0
    assert (pages / "main" / "index.html").read_text() == "second"
    assert not (pages / "main" / "howto" / "core.html").exists()
    assert (pages / "tw-core-v0.2.0" / "index.html").read_text() == "first"


@pytest.mark.parametrize("version", ["0.2.0", "../main", "tw-core-v", "feature", ""])
def test_what_is_no_version_is_refused(site, pages, version):
    done = publish(site, pages, version)
    assert done.returncode == 1
    assert (
        f"or a release's tag, such as 'tw-core-v0.2.0'; got {version!r}" in done.stderr
    )
    assert [path.name for path in pages.iterdir()] == [".git"]


def test_a_folder_without_a_site_is_refused(tmp_path, pages):
    done = publish(tmp_path, pages, "main")
    assert "holds no site; nox -s docs builds one" in done.stderr
