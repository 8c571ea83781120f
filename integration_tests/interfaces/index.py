"""A package as an index shows it: there is no repository around its README.

In the repository links lead to the files of the same commit, in a clone too. What is
uploaded leads to these files at the release's tag, under the address that the release's
workflow passes; no file contains it, so that a fork's packages lead to the fork.
"""

import os
import re
import shutil
from pathlib import Path

from interfaces.manifest import Manifest, read_manifests

# A block or a span of code, which stays, or the target of a link or picture.
_TARGET = re.compile(
    r"^(?P<fence>```+|~~~+).*?^(?P=fence)|(?P<span>`+)[^`]+(?P=span)"
    r"|(?P<before>(?P<shows>!?)\[[^\]]*\]\()(?P<path>[^)#\s]+)",
    re.MULTILINE | re.DOTALL,
)
_ADDRESS = re.compile(r"https://[^\s/]+(/[\w.-]+)+")


def run(root: Path, package: str, address: str, into: Path) -> None:
    """Writes a package's folder with absolute links, and addresses in its metadata."""
    own = read_manifests(root)[package]
    if not _ADDRESS.fullmatch(address):
        raise ValueError(
            f"address must be the repository's, such as https://HOST/OWNER/NAME; got "
            f"{address!r}."
        )
    shutil.copytree(root / own.folder, into)
    readme, project = into / "README.md", into / "pyproject.toml"
    readme.write_text(with_addresses(root, own, readme.read_text(), address))
    lines = [f'{label} = "{url}"' for label, url in urls(own, address).items()]
    project.write_text("\n".join([project.read_text(), "[project.urls]", *lines, ""]))


def urls(own: Manifest, address: str) -> dict[str, str]:
    """Returns what an index lists beside a release, by labels that it knows."""
    return {
        "Homepage": address,
        "Documentation": f"{address}/blob/{own.tag}/docs/howto/index.md",
        "Changelog": f"{address}/blob/{own.tag}/{own.folder}/CHANGELOG.md",
        "Issues": f"{address}/issues",
        "Source": f"{address}/tree/{own.tag}/{own.folder}",
    }


def with_addresses(root: Path, own: Manifest, readme: str, address: str) -> str:
    """Makes the links of a package's README absolute, code apart.

    ``ValueError`` names the links that lead to no file.
    """
    lost = []

    def absolute(found: re.Match[str]) -> str:
        path = found["path"]
        if not path or ":" in path:
            return found[0]
        file = os.path.normpath(f"{own.folder}/{path}")
        if not (root / file).exists():
            lost.append(path)
        kind = "raw" if found["shows"] else "blob"
        if (root / file).is_dir():
            kind = "tree"
        return f"{found['before']}{address}/{kind}/{own.tag}/{file}"

    text = _TARGET.sub(absolute, readme)
    if lost:
        raise ValueError(f"{own.folder}/README.md links to {lost}, which do not exist.")
    return text
