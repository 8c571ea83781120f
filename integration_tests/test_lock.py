"""Every version that the sessions of `nox` install is held by constraints.txt."""

import ast
import re
import tomllib

from harness.docs_blocks import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

ENTRY = re.compile(r"^([\w.-]+)==([^\s;\\]+).*\\\n(?= +--hash=sha256:)", re.MULTILINE)
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())
MANIFESTS = [
    tomllib.loads(path.read_text()) for path in ROOT.glob("packages/*/pyproject.toml")
]


def lines_of(groups, name):
    for line in groups.get(name, ()):
        if isinstance(line, dict):
            yield from lines_of(groups, line["include-group"])
        else:
            yield line


def wanted():
    """All requirements of the packages, of their tests and of the sessions' groups."""
    noxfile = (ROOT / "noxfile.py").read_text()
    locked = re.search(r"^LOCKED = (\(.*?^\))", noxfile, re.MULTILINE | re.DOTALL)[1]
    for name in ast.literal_eval(locked):
        yield from lines_of(TOOLS["dependency-groups"], name)
    for manifest in MANIFESTS:
        yield from manifest["project"]["dependencies"]
        yield from manifest["build-system"]["requires"]
        yield from lines_of(manifest.get("dependency-groups", {}), "test")


def held_in(file):
    """The versions that a file of the lock holds, by name."""
    held = {}
    for name, version in ENTRY.findall((ROOT / file).read_text()):
        held.setdefault(name, []).append(Version(version))
    return held


def test_all_that_sessions_ask_for_is_held_in_a_version_that_they_allow():
    held = held_in("constraints.txt")
    ours = {manifest["project"]["name"] for manifest in MANIFESTS}
    needs = {need for need in map(Requirement, wanted()) if need.name not in ours}
    assert len(needs) > 30
    for need in needs:
        assert all(map(need.specifier.contains, held[need.name.lower()])), need


def test_what_builds_for_an_index_is_held_with_a_hash_for_each_line():
    held = held_in(".github/nox.txt")
    [needed] = map(Requirement, lines_of(TOOLS["dependency-groups"], "nox"))
    assert str(needed) in (ROOT / ".ci" / "run").read_text()
    assert {needed.name, *needed.extras} <= held.keys()
    assert all(map(needed.specifier.contains, held[needed.name]))
    lines = (ROOT / ".github/nox.txt").read_text().splitlines()
    assert sum("==" in line for line in lines) == sum(map(len, held.values()))
