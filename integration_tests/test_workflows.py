"""The forge's workflows run what CI runs here, on what the packages declare."""

import re
import subprocess
import tomllib

import pytest
import yaml
from docs_blocks import ROOT
from interfaces.citation import FILE, SECTION, last_release
from interfaces.manifest import read_manifests
from packaging.version import Version
from test_docs_commands import SESSION, sessions

FOLDER = ROOT / ".github"
PATHS = sorted(FOLDER.glob("workflows/*.yml"))
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in PATHS}
JOBS = [
    pytest.param(job, id=f"{name}-{own}")
    for name, workflow in WORKFLOWS.items()
    for own, job in workflow["jobs"].items()
]
CLIENTS = ROOT.glob("integration_tests/clients/*.py")
STEPS = [step for param in JOBS for step in param.values[0]["steps"]]
COMMANDS = [step["run"] for step in STEPS if "run" in step]
PYTHON = "Programming Language :: Python :: "
TRIGGER = True  # `on`, as YAML 1.1 reads it


def ci_command():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    (command,) = [line for line in lines if "nox" in line]
    return command


def test_the_workflows_are_those_that_contributing_describes():
    page = (ROOT / "docs" / "CONTRIBUTING.md").read_text()
    assert WORKFLOWS.keys() == {"docs", "lock", "nightly", "release", "tests"}
    for name in WORKFLOWS:
        assert f"`{name}.yml`" in page


def test_every_change_is_tested_by_the_very_command_of_ci():
    quick, job = WORKFLOWS["tests"]["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [ci_command()]
    assert job["needs"] == "quick"
    assert quick["timeout-minutes"] <= 20
    assert {"push", "pull_request"} <= WORKFLOWS["tests"][TRIGGER].keys()


def test_the_other_workflows_begin_as_ci_does_and_run_a_session():
    others = [c for c in COMMANDS if "nox" in c and c != ci_command()]
    named = [c.removeprefix(f"{ci_command()} -s ").split()[0] for c in others]
    wanted = ['"clients($CLIENT)"', "docs", "full", "lint", "lock", "nightly", "tagged"]
    assert sorted(named) == wanted


def test_every_client_trains_by_night():
    clients = WORKFLOWS["nightly"]["jobs"]["clients"]["strategy"]["matrix"]["client"]
    assert clients == sorted(path.stem for path in CLIENTS)


def test_every_python_that_a_package_declares_is_tested_and_no_other():
    job = WORKFLOWS["tests"]["jobs"]["tests"]
    tested = job["strategy"]["matrix"]["python"]
    noxfile = (ROOT / "noxfile.py").read_text()
    assert f"PYTHONS = [v for v in {tuple(tested)}".replace("'", '"') in noxfile
    for name in read_manifests(ROOT):
        text = (ROOT / "packages" / name / "pyproject.toml").read_text()
        project = tomllib.loads(text)["project"]
        classified = [c.removeprefix(PYTHON) for c in project["classifiers"]]
        assert [v for v in classified if re.fullmatch(r"3\.\d+", v)] == tested, name
        assert project["requires-python"] == f">={tested[0]}", name


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_sessions_that_a_workflow_names_exist(path):
    named = {
        word.strip('"').partition("(")[0]
        for words in SESSION.findall(path.read_text())
        for word in words.split()
    }
    assert named <= sessions(), named


@pytest.mark.parametrize("job", JOBS)
def test_a_job_may_do_what_it_needs_and_ends(job):
    assert 0 < job["timeout-minutes"] <= 120
    assert "permissions" in job
    writes = {scope for scope, right in job["permissions"].items() if right == "write"}
    used = {step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step}
    publishes = "pypa/gh-action-pypi-publish" in used
    assert ("id-token" in writes) == publishes
    assert (job.get("environment") == "pypi") == publishes
    if writes:  # builds nothing, which would run what others wrote with these rights
        assert not [s for s in job["steps"] if "pip install" in s.get("run", "")]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_has_no_rights_but_those_of_its_jobs(name):
    assert WORKFLOWS[name]["permissions"] == {}
    assert WORKFLOWS[name]["concurrency"]["group"]


def test_actions_are_pinned_by_commit_one_version_of_each():
    text = "\n".join(path.read_text() for path in PATHS)
    pinned = set(re.findall(r"uses: (\S+)@([0-9a-f]{40}) # (v[\d.]+)$", text, re.M))
    assert len(re.findall("uses:", text)) == sum(
        text.count(f"uses: {action}@{commit} # {version}\n")
        for action, commit, version in pinned
    )
    assert len({action for action, _, _ in pinned}) == len(pinned) > 4


def test_a_release_is_published_from_the_tags_that_the_tool_makes():
    (pattern,) = WORKFLOWS["release"][TRIGGER]["push"]["tags"]
    assert WORKFLOWS["docs"][TRIGGER]["push"]["tags"] == [pattern]
    wanted = re.compile(pattern.replace("*", "[^/]*"))
    tags = [one.tag for one in read_manifests(ROOT).values()]
    assert all(wanted.fullmatch(tag) for tag in [*tags, "tw-core-v0.2.0"])
    build, publish = WORKFLOWS["release"]["jobs"].values()
    assert '-s tagged -- "$GITHUB_REF_NAME"' in build["steps"][2]["run"]
    assert publish["needs"] == "build"


def test_a_night_that_fails_is_told_in_one_issue():
    job = WORKFLOWS["nightly"]["jobs"]["report"]
    assert job["needs"] == ["tests", "full", "clients"]
    assert "failure()" in job["if"]
    (step,) = job["steps"]
    find, comment, create = (
        step["run"].index(f"gh issue {verb}") for verb in ("list", "comment", "create")
    )
    assert find < comment < create


GH = """#!/bin/sh
echo "$1 $2" >> "$SAID"
if [ "$2" = list ]; then printf %s "$OPEN"; fi
"""


@pytest.mark.parametrize(
    ("open_issue", "does"), [("", "issue create"), ("7", "issue comment")]
)
def test_an_open_issue_gets_a_comment_and_none_is_opened_twice(
    tmp_path, open_issue, does
):
    (step,) = WORKFLOWS["nightly"]["jobs"]["report"]["steps"]
    (tmp_path / "gh").write_text(GH)
    (tmp_path / "gh").chmod(0o755)
    said = tmp_path / "said"
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SAID": str(said), "OPEN": open_issue}
    command = ["bash", "-e", "-o", "pipefail", "-c", step["run"]]
    subprocess.run(command, env={**env, "RUN": "here"}, check=True, timeout=30)
    assert said.read_text().split("\n")[:-1] == ["label create", "issue list", does]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_workflow_runs_is_bash(command):
    subprocess.run(["bash", "-n", "-c", command], check=True, timeout=30)


def test_the_form_for_faults_asks_for_what_is_needed():
    form = yaml.safe_load((FOLDER / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    fields = {field["id"]: field for field in form["body"] if "id" in field}
    assert "`tw-doctor`" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"]["validations"]["required"]
    assert "report" in fields["report"]["attributes"]["label"]
    assert (
        set(fields["package"]["attributes"]["options"]) == read_manifests(ROOT).keys()
    )


def test_the_citation_is_of_the_last_release_and_no_version_is_behind_its_changelog():
    citation = yaml.safe_load((ROOT / FILE).read_text())
    version, date = last_release(ROOT)
    assert (citation["version"], citation["date-released"]) == (version, date)
    manifests = read_manifests(ROOT)
    assert Version(version) <= max(one.version for one in manifests.values())
    for one in manifests.values():
        text = (ROOT / one.folder / "CHANGELOG.md").read_text()
        dated = SECTION.findall(text)
        released = [Version(version) for version, _ in dated]
        assert released == sorted(released, reverse=True), one.name
        assert [date for _, date in dated] == sorted(
            (d for _, d in dated), reverse=True
        )
        # What is under way is told in fragments, until the next release.
        told = len(list((ROOT / one.folder / "changelog.d").glob("*.md"))) > 1
        assert one.version >= released[0], one.name
        assert told or one.version == released[0], one.name


def test_the_forms_and_the_citation_are_of_this_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    for name in read_manifests(ROOT):
        text = (ROOT / "packages" / name / "pyproject.toml").read_text()
        project = tomllib.loads(text)["project"]
        assert citation["license"] == project["license"]
        assert citation["authors"] == project["authors"]
    for path in FOLDER.rglob("*.yml"):
        for page in re.findall(r"`(docs/[\w./]+)`", path.read_text()):
            assert (ROOT / page).exists(), f"{path}: {page}"
