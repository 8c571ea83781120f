"""The forge's workflows run what CI runs here, on what the packages declare.

That they are well-formed, pinned and have no right too many, `nox -s lint` checks.
"""

import re
import tomllib

import pytest
import yaml
from harness.docs_blocks import ROOT
from interfaces.manifest import SECTION, read_manifests
from packaging.version import Version
from test_docs_commands import SESSION, bare, sessions

FOLDER = ROOT / ".github"
PATHS = sorted(FOLDER.glob("workflows/*.yml"))
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in PATHS}
JOBS = [job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()]
COMMANDS = [step["run"] for job in JOBS for step in job["steps"] if "run" in step]
MANIFESTS = read_manifests(ROOT)
PROJECTS = {
    name: tomllib.loads((ROOT / one.folder / "pyproject.toml").read_text())["project"]
    for name, one in MANIFESTS.items()
}
PYTHON = "Programming Language :: Python :: "
TRIGGER = True  # `on`, as YAML 1.1 reads it


def test_all_begin_as_ci_does_and_every_change_is_tested_by_its_very_command():
    [ci] = [x for x in (ROOT / ".ci" / "run").read_text().splitlines() if "nox" in x]
    commands = [command for command in COMMANDS if "bin/nox" in command]
    [others] = [command for command in commands if not command.startswith(ci)]
    assert others == WORKFLOWS["release"]["jobs"]["build"]["steps"][2]["run"]
    _, tests = WORKFLOWS["tests"]["jobs"].values()
    assert [step["run"] for step in tests["steps"] if "run" in step] == [ci]
    assert tests["needs"] == "quick"
    assert {"push", "pull_request"} <= WORKFLOWS["tests"][TRIGGER].keys()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_sessions_that_a_workflow_names_exist(path):
    said = SESSION.findall(path.read_text())
    named = {bare(word.strip('"')) for words in said for word in words.split()}
    assert named <= sessions(), named
    assert f"`{path.name}`" in (ROOT / "docs" / "CONTRIBUTING.md").read_text()


def test_every_client_trains_by_night():
    clients = WORKFLOWS["nightly"]["jobs"]["clients"]["strategy"]["matrix"]["client"]
    paths = ROOT.glob("integration_tests/lab/clients/*.py")
    assert clients == sorted(path.stem for path in paths)


def test_every_python_that_a_package_declares_is_tested_and_no_other():
    job = WORKFLOWS["tests"]["jobs"]["tests"]
    tested = job["strategy"]["matrix"]["python"]
    noxfile = (ROOT / "noxfile.py").read_text()
    assert f"PYTHONS = [v for v in {tuple(tested)}".replace("'", '"') in noxfile
    for name, project in PROJECTS.items():
        classified = [c.removeprefix(PYTHON) for c in project["classifiers"]]
        assert "Operating System :: POSIX :: Linux" in project["classifiers"], name
        assert [v for v in classified if re.fullmatch(r"3\.\d+", v)] == tested, name
        assert project["requires-python"] == f">={tested[0]}", name


def test_a_release_is_published_from_the_tags_that_the_tool_makes():
    (pattern,) = WORKFLOWS["release"][TRIGGER]["push"]["tags"]
    assert WORKFLOWS["docs"][TRIGGER]["push"]["tags"] == [pattern]
    wanted = re.compile(pattern.replace("*", "[^/]*"))
    assert all(wanted.fullmatch(one.tag) for one in MANIFESTS.values())
    build, publish = WORKFLOWS["release"]["jobs"].values()
    step = build["steps"][2]
    assert step["run"].endswith('nox -s build -- "$GITHUB_REF_NAME" "$ADDRESS"')
    assert step["env"]["ADDRESS"] == (
        "${{ github.server_url }}/${{ github.repository }}"
    )
    assert "pip install --quiet --require-hashes -r .github/nox.txt &&" in step["run"]
    assert publish["needs"] == "build"
    sorting, *attesting, upload = publish["steps"][1:]
    assert [step["with"].get("sbom-path") for step in attesting] == [
        None,
        "bill.cdx.json",
    ]
    assert {step["with"]["subject-path"] for step in attesting} == {"dist/*"}
    assert upload["with"]["packages-dir"] == "dist"
    assert ".cdx.json" in sorting["run"]


def test_the_form_for_faults_asks_for_what_is_needed():
    form = yaml.safe_load((FOLDER / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    fields = {field["id"]: field for field in form["body"] if "id" in field}
    assert fields["doctor"]["validations"]["required"]
    assert {*fields["package"]["attributes"]["options"]} == MANIFESTS.keys()


def test_no_version_is_behind_its_changelog():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    last = citation["date-released"], citation["version"]
    sections = set()
    for name, one in MANIFESTS.items():
        assert citation["license"] == PROJECTS[name]["license"]
        assert citation["authors"] == PROJECTS[name]["authors"]
        dated = SECTION.findall((ROOT / one.folder / "CHANGELOG.md").read_text())
        sections |= {(date, version) for version, date in dated}
        released = [Version(version) for version, _ in dated]
        assert released == sorted(released, reverse=True), name
        # What is under way is told in fragments, until the next release.
        told = len(list((ROOT / one.folder / "changelog.d").glob("*.md"))) > 1
        assert told or [one.version] == released[:1], name
        assert [one.version] >= released[:1], name
    assert last in sections
    assert last[0] == max(sections)[0]
