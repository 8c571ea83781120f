"""Puts a built site beside those of other versions: ``publish.py SITE PAGES VERSION``.

PAGES is the folder that a server shows: a folder per version in it, ``versions.json``,
from which the pages offer the others, and an ``index.html`` that leads to the newest.
VERSION is ``main``, or the tag of a release: packages have versions of their own, so
that the site as it was at ``tw-core-v0.2.1`` is that of tw-core 0.2.1.
"""

import argparse
import json
import re
import shutil
from pathlib import Path

LIST = "versions.json"
SCRIPT = "_static/versions.js"  # which asks for the list where there is one
BRANCH = "main"
_RELEASE = re.compile(r"(tw-[a-z]+)-v((\d+(?:\.\d+)*)(?:rc(\d+))?)")
_START = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>towers</title>
<meta http-equiv="refresh" content="0; url={folder}/">
<a href="{folder}/">towers</a>
"""


def publish(site: Path, pages: Path, version: str) -> None:
    """Puts ``site`` into ``pages``, in place of one of the same version."""
    if version != BRANCH and not _RELEASE.fullmatch(version):
        raise ValueError(
            f"publish: version must be {BRANCH!r} or a release's tag, such as "
            f"'tw-core-v0.2.0'; got {version!r}."
        )
    if not (site / "index.html").exists():
        raise ValueError(f"publish: {site} holds no site; nox -s docs builds one.")
    shutil.rmtree(pages / version, ignore_errors=True)
    shutil.copytree(site, pages / version)
    script = pages / version / SCRIPT
    script.write_text(
        script.read_text().replace("PUBLISHED = false", "PUBLISHED = true")
    )
    folders = [path.parent.name for path in pages.glob("*/index.html")]
    versions = [{"folder": name, "name": _shown(name)} for name in in_order(folders)]
    (pages / LIST).write_text(json.dumps(versions, indent=1) + "\n")
    (pages / "index.html").write_text(_START.format(folder=versions[0]["folder"]))
    (pages / ".nojekyll").touch()  # or folders such as _static would be left out


def in_order(folders: list[str]) -> list[str]:
    """Returns the branch, then releases by package, the newest of each first."""
    releases = [found for name in folders if (found := _RELEASE.fullmatch(name))]
    releases.sort(key=_numbers, reverse=True)
    releases.sort(key=lambda release: release[1])
    return [BRANCH] * (BRANCH in folders) + [release[0] for release in releases]


def _numbers(release: re.Match[str]) -> tuple[list[int], float]:
    """Orders versions, a candidate before its release."""
    numbers = [int(number) for number in release[3].split(".")]
    return numbers, float(release[4] or "inf")


def _shown(folder: str) -> str:
    release = _RELEASE.fullmatch(folder)
    return f"{release[1]} {release[2]}" if release else "development"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("pages", type=Path)
    parser.add_argument("version", help=f"{BRANCH}, or a release's tag")
    publish(**vars(parser.parse_args()))
