"""Every version that the sessions of `nox` install is held by constraints.txt."""

import ast
import re
import tomllib

import pytest
from docs_blocks import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

LOCK = (ROOT / "constraints.txt").read_text()
ENTRY = re.compile(
    r"^([\w.-]+)==([^\s;\\]+)(?: ; ([^\\\n]+))? \\\n((?: +--hash.*\n)+)", re.M
)
NOXFILE = ast.parse((ROOT / "noxfile.py").read_text())
FUNCTIONS = {f.name: f for f in NOXFILE.body if isinstance(f, ast.FunctionDef)}
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())
MANIFESTS = [
    tomllib.loads(path.read_text()) for path in ROOT.glob("packages/*/pyproject.toml")
]


def lines_of(groups, name):
    for line in groups[name]:
        if isinstance(line, dict):
            yield from lines_of(groups, line["include-group"])
        else:
            yield line


def assigned(name):
    """What noxfile.py assigns to a name; it is not imported, which would need nox."""
    (value,) = [
        node.value
        for node in NOXFILE.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    return ast.literal_eval(value)


def wanted():
    """All requirements of the packages, of their tests and of the sessions' groups."""
    for name in assigned("LOCKED"):
        yield from lines_of(TOOLS["dependency-groups"], name)
    for manifest in MANIFESTS:
        yield from manifest["project"]["dependencies"]
        yield from manifest["build-system"]["requires"]
        if "test" in (groups := manifest.get("dependency-groups", {})):
            yield from lines_of(groups, "test")


def test_every_line_is_an_entry_with_hashes():
    rest = ENTRY.sub("", LOCK)
    assert [line for line in rest.splitlines() if line[:1] != "#"] == []
    for name, _, _, hashes in ENTRY.findall(LOCK):
        assert "sha256:" in hashes, name


def test_all_that_sessions_ask_for_is_held_in_a_version_that_they_allow():
    held = {}
    for name, version, _, _ in ENTRY.findall(LOCK):
        held.setdefault(name, []).append(Version(version))
    ours = {manifest["project"]["name"] for manifest in MANIFESTS}
    needs = {Requirement(line) for line in wanted()}
    assert len(needs) > 30
    for need in needs:
        if need.name not in ours:
            assert all(map(need.specifier.contains, held[need.name.lower()])), need


@pytest.mark.parametrize("heavy", ["torch", "ray", "nvidia-nccl-cu12"])
def test_the_lock_stays_small(heavy):
    assert heavy not in {entry[0] for entry in ENTRY.findall(LOCK)}


def test_the_sessions_of_every_change_install_under_the_lock():
    default = assigned("nox.options.sessions")
    for name in [*default, "build", "run_on_wheels", "train", "docs"]:
        called = [
            ast.unparse(node.func)
            for node in ast.walk(FUNCTIONS[name])
            if isinstance(node, ast.Call)
        ]
        assert "session.install" not in called, name
        assert {"install", "run_on_wheels"} & set(called), name
