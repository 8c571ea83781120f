"""Sessions that test, check, build and run the packages."""

import atexit
import datetime
import json
import os
import re
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2026.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = True
# Every change must pass these. `full` runs the rest, at night.
nox.options.sessions = ["lint", "tests", "integration"]

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
SITE = ROOT / "out" / "docs"
DURATIONS = ROOT / "integration_tests" / "durations.txt"
RAN: dict[str, dict[str, int]] = {}  # session -> how many tests passed, and wait
# The interpreters that TensorFlow supports, as far as they are present.
PYTHONS = [v for v in ("3.11", "3.12", "3.13") if shutil.which(f"python{v}")]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
# What users and tests do without; its README says when to run it.
LAB = ROOT / "integration_tests" / "lab"
CLIENTS = sorted(path.stem for path in LAB.glob("clients/*.py"))

# Nightly builds that replace releases, to try coming versions.
NIGHTLY = {
    "tensorflow": "tf-nightly",
    "keras": "keras-nightly",
    "tf-keras": "tf-keras-nightly",
}
# The versions that the sessions of `nox` install, with hashes; `nox -s lock` writes it.
LOCK = ROOT / "constraints.txt"
# Groups of pyproject.toml in the lock; PyTorch, Ray and the clients are not.
LOCKED = (
    "test",
    "coverage",
    "examples",
    "rl",
    "release",
    "horovod",
    "lint",
    "layers",
    "docs",
    "bench",
)
# Schema of check-jsonschema -> the files that it checks.
FORGE_FILES = {
    "vendor.github-workflows": [".github/workflows/*.yml"],
    "custom.github-workflows-require-timeout": [".github/workflows/*.yml"],
    "vendor.github-issue-forms": [".github/ISSUE_TEMPLATE/[!c]*.yml"],
    "vendor.github-issue-config": [".github/ISSUE_TEMPLATE/config.yml"],
    "vendor.dependabot": [".github/dependabot.yml"],
    "vendor.citation-file-format": ["CITATION.cff"],
}

# The documentation's builders share the pages that one of them has parsed.
READ_ONCE = ("--doctree-dir", "out/doctrees")
# Without bytecode on disk, TensorFlow takes twice as long to import.
ENV = {"PYTHONDONTWRITEBYTECODE": "", "TF_CPP_MIN_LOG_LEVEL": "2"}


def at_once(processes: int) -> tuple[str, ...]:
    """Returns the arguments that spread tests over processes; idle ones steal work.

    More processes than two cores, as many tests wait for a deadline or a peer; only a
    few more, as each imports TensorFlow, and peers must arrive before a deadline.
    """
    return ("--numprocesses", str(processes), "--dist", "worksteal")


def group(name: str, root: Path = ROOT) -> tuple[str, ...]:
    """Returns the requirements of a dependency group of a tree's pyproject.toml."""
    pyproject = nox.project.load_toml(root / "pyproject.toml")
    return nox.project.dependency_groups(pyproject, name)


def test_requirements(*packages: str, root: Path = ROOT) -> list[str]:
    """Returns the requirements of packages' tests: the common group and their own."""
    requirements = list(group("test", root))
    for package in packages:
        path = root / "packages" / package / "pyproject.toml"
        pyproject = nox.project.load_toml(path)
        if "test" in pyproject.get("dependency-groups", {}):
            requirements += nox.project.dependency_groups(pyproject, "test")
    return requirements


def dependencies(package: str) -> list[Requirement]:
    """Returns the requirements that ``package`` declares."""
    project = nox.project.load_toml(f"packages/{package}/pyproject.toml")["project"]
    return [Requirement(line) for line in project["dependencies"]]


def siblings(package: str) -> list[str]:
    """Returns the packages of this repository that ``package`` requires."""
    return [need.name for need in dependencies(package) if need.name in PACKAGES]


def third_parties(*packages: str) -> list[str]:
    """Returns the packages' requirements from outside, each line once."""
    needs = [need for package in packages for need in dependencies(package)]
    return sorted({str(need) for need in needs if need.name not in PACKAGES})


def closure(package: str) -> list[str]:
    """Returns ``package`` and all siblings that it requires, directly or not."""
    needed = [package]
    for name in needed:  # grows on the way
        needed += [sibling for sibling in siblings(name) if sibling not in needed]
    return needed


def editable(*packages: str) -> list[str]:
    """Returns the arguments that install packages from the checkout."""
    return [arg for package in packages for arg in ("-e", f"packages/{package}")]


def install(session: nox.Session, *needed: str) -> None:
    """Installs the lock's versions, so that no new upload breaks a session.

    Packages outside the lock are not pinned. pip accepts no hashes in constraints, so
    without uv none are.
    """
    locked = ("--constraints", str(LOCK), "--build-constraints", str(LOCK))
    session.install(*(locked if session.venv_backend == "uv" else ()), *needed)


def wheel(package: str) -> str:
    """Returns the path of the wheel that the session ``build`` left in dist/."""
    found = list(DIST.glob(f"{package.replace('-', '_')}-*.whl"))
    if len(found) != 1:  # without one, the installer would look for the name online
        raise FileNotFoundError(f"dist/ must hold one wheel of {package}; got {found}.")
    return str(found[0])


def tool(session: nox.Session, *arguments: str | Path, **options: Any) -> str:
    """Runs a module of integration_tests with the session's Python."""
    env = {**ENV, "PYTHONPATH": str(ROOT / "integration_tests")}
    command = ("python", "-m", *map(str, arguments))
    return str(session.run(*command, env=env, **options))


def run_tests(session: nox.Session, *arguments: str, **env: str | None) -> None:
    """Runs tests, and notes how many passed and how many wait for ``full``."""
    result = (Path(session.create_tmp()) / "result.json").resolve()
    env = {**ENV, "TOWERS_RESULT": str(result), **env}
    session.run("pytest", "--durations=10", *at_once(3), *arguments, env=env)
    RAN[session.name] = json.loads(result.read_text())


@atexit.register
def say_what_passed() -> None:
    """Says in the last line what every change ran, and what else there is."""
    if all(name in RAN for name in ("tests", "integration")):
        counts = {
            key: sum(one[key] for one in RAN.values()) for key in ("passed", "left_out")
        }
        took = float(DURATIONS.read_text().partition(" ")[0]) / 60
        print(
            f"{counts['passed']:,} quick tests passed. `nox -s full` runs "
            f"{counts['left_out']:,} more, in {took:.0f} minutes on two idle cores."
        )


@nox.session(reuse_venv=True)
def tests(session: nox.Session) -> None:
    """Runs the packages' quick tests and doctests, from the checkout; every change."""
    install(session, *editable(*PACKAGES), *test_requirements(*PACKAGES))
    run_tests(session, "--doctest-modules", *session.posargs)


@nox.session(reuse_venv=True)
def build(session: nox.Session) -> None:
    """Builds each package's sdist, and its wheel from that, into dist/."""
    install(session, *group("build"))
    # Where --no-install skips the builds, the archives stay.
    session.run_install("rm", "-rf", str(DIST), external=True, silent=True)
    for package in PACKAGES:
        build_archives(session, package, DIST)


def build_archives(session: nox.Session, package: str, into: Path) -> None:
    """Builds a package's sdist, and its wheel from that."""
    python = str(Path(session.bin) / "python")
    here = ("--no-build-isolation", "--python", python, "--no-create-gitignore")
    # Other sessions install the wheels: --install-only must not skip this.
    session.run_install(
        *("python", "-m", "uv", "build", *here),
        *("--out-dir", str(into), f"packages/{package}"),
        silent=True,
    )


# Environments that hold wheels are recreated: a rebuilt wheel of an unchanged
# version would not be installed over the old one.


@nox.session(requires=["build"], reuse_venv=False)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def unit(session: nox.Session, package: str) -> None:
    """Runs one package's tests with only the wheels that it requires."""
    session.install(*map(wheel, closure(package)), *test_requirements(package))
    env = {**ENV, "PYTHONPATH": None}
    session.run("pytest", f"packages/{package}/tests", *session.posargs, env=env)


def install_wheels(session: nox.Session, *more: str) -> None:
    """Installs all packages from their wheels, and what the integration tests need."""
    groups = ("examples", "rl", "release", *more)
    needed = (*test_requirements(*PACKAGES), *(x for own in groups for x in group(own)))
    install(session, *map(wheel, PACKAGES), *needed)


@nox.session(requires=["build"], reuse_venv=False)
def integration(session: nox.Session) -> None:
    """Runs the quick tests of the packages together, on wheels; every change."""
    install_wheels(session, "horovod")
    run_tests(session, *(session.posargs or ["integration_tests"]), PYTHONPATH=None)


@nox.session(requires=["build"], reuse_venv=False)
def full(session: nox.Session) -> None:
    """Runs all cases of all tests, on wheels, by night and before a release.

    As in ``-- tw-keras tw-ranks``: of these packages and of the integration tests that
    use them; ``-- gallery``: of the integration tests of that name. Arguments with a
    dash are pytest's, but for ``--record``, which rewrites the file of durations.
    """
    install_wheels(session, "horovod-full")
    words = [word for word in session.posargs if not word.startswith("-")]
    options = [word for word in session.posargs if word.startswith("-")]
    env: dict[str, str | None] = {"TOWERS_TESTS": "full", "PYTHONPATH": None}
    if "gallery" in words:
        env["TOWERS_GALLERY"] = "full"
    if "--record" in options:
        options.remove("--record")
        env["TOWERS_DURATIONS"] = str(DURATIONS)
    if words:
        found = tool(session, "structure.users", *words, silent=True).split()
        runs = [[x for x in found if x.startswith(y)] for y in ("integr", "packages")]
    else:
        runs = [["integration_tests"], ["packages"]]
    began = time.monotonic()
    failed = []
    for paths in filter(None, runs):
        try:
            run_tests(session, *options, *paths, **env)
        except nox.command.CommandFailed:
            failed += paths
    if failed:
        session.error(f"tests of {', '.join(failed)} failed, as said above")
    if "TOWERS_DURATIONS" in env and not words:
        tool(session, "structure.durations", f"{time.monotonic() - began:.0f}")
    if not words:
        for name in ("pieces", "docs"):
            session.notify(name, posargs=[])


@nox.session(requires=["build"], reuse_venv=False, python=PYTHONS)
@nox.parametrize("resolution", ["lowest-direct", "highest"], ids=["lowest", "newest"])
def matrix(session: nox.Session, resolution: str) -> None:
    """Runs all packages' tests with the oldest and newest dependencies; needs uv."""
    if session.venv_backend != "uv":
        session.error("matrix resolves with uv; install it with pip install 'nox[uv]'")
    # TensorFlow before 2.21 writes graphs in a way that protobuf 7 does not support.
    bounds = Path(session.create_tmp()) / "bounds.txt"
    bounds.write_text("protobuf<7\n" if resolution == "lowest-direct" else "")
    # uv does not treat a wheel's requirements as direct: they must be named.
    session.install(
        *("--resolution", resolution, "--constraints", str(bounds)),
        *map(wheel, PACKAGES),
        *third_parties(*PACKAGES),
        *test_requirements(*PACKAGES),
    )
    session.run("uv", "pip", "list")
    run_and_note(session, "newest" if resolution == "highest" else "lowest")


def run_and_note(session: nox.Session, dependencies: str) -> None:
    """Runs the packages' tests; if all pass, writes a row of docs/tested.md."""
    env = {**ENV, "PYTHONPATH": None}
    session.run("pytest", *at_once(4), *session.posargs, env=env)
    tool(session, "structure.tested", dependencies, *session.posargs)


@nox.session(requires=["build"], reuse_venv=False)
def nightly(session: nox.Session) -> None:
    """Runs all packages' tests with the nightly builds of TensorFlow and Keras."""
    needed = [*third_parties(*PACKAGES), *test_requirements(*PACKAGES)]
    kept = [line for line in needed if Requirement(line).name not in NIGHTLY]
    session.install(*sorted(set(NIGHTLY.values())), *kept)
    session.install("--no-deps", *map(wheel, PACKAGES))
    run_and_note(session, "nightly")


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Checks style, format, types, ``layers``, wording, and the forge's files."""
    install(session, *group("lint"), *group("layers"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    check_layers(session)
    for schema, patterns in FORGE_FILES.items():
        files = [str(path) for pattern in patterns for path in ROOT.glob(pattern)]
        session.run("check-jsonschema", "--builtin-schema", schema, *files)
    # Offline, it does not look up known vulnerabilities of pinned actions.
    session.run("zizmor", "--offline", "--quiet", ".github")


@nox.session(reuse_venv=True)
def layers(session: nox.Session) -> None:
    """Checks imports between packages, and packages' limits; part of ``lint``."""
    install(session, *group("layers"))
    check_layers(session)


def check_layers(session: nox.Session) -> None:
    """Fails if an import is not allowed, or a limit is exceeded."""
    tool(session, "structure.limits")
    sources = [str(ROOT / "packages" / package / "src") for package in PACKAGES]
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(sources)})


@nox.session(reuse_venv=True)
def lock(session: nox.Session) -> None:
    """Rewrites constraints.txt, for every Python and platform; needs uv."""
    if session.venv_backend != "uv":
        session.error("lock resolves with uv; install it with pip install 'nox[uv]'")
    wanted = [*third_parties(*PACKAGES), *test_requirements(*PACKAGES)]
    wanted += [line for name in LOCKED for line in group(name)]
    listed = Path(session.create_tmp()) / "wanted.txt"
    listed.write_text("".join(f"{line}\n" for line in sorted(set(wanted))))
    session.run(
        *("uv", "pip", "compile", "--quiet", "--upgrade"),
        *("--universal", "--python-version", "3.11", "--generate-hashes"),
        *("--no-annotate", "--custom-compile-command", "nox -s lock"),
        *("--output-file", str(LOCK), str(listed)),
        silent=True,
    )


@nox.session(reuse_venv=True)
def coverage(session: nox.Session) -> None:
    """Measures branch coverage of a package by its own tests, as in: -- tw-reduce.

    Writes the rows of the table in docs/design/house.md; no number makes it fail.
    """
    install(session, *editable(*PACKAGES), *group("coverage"))
    install(session, *test_requirements(*PACKAGES))
    data = Path(session.create_tmp()).resolve()
    for package in session.posargs or PACKAGES:
        env = {**ENV, "COVERAGE_FILE": str(data / package)}
        module = package.replace("-", "_")
        measured = ("--cov", module, "--cov-branch", "--cov-report", "")
        tests_of = f"packages/{package}/tests"
        session.run("pytest", *at_once(4), *measured, tests_of, env=env)
        report = str(data / f"{package}.json")
        session.run("coverage", "json", "--quiet", "-o", report, env=env)
        tool(session, "structure.covered", package, report)


@nox.session(reuse_venv=True)
def structure(session: nox.Session) -> None:
    """Prints the packages' sizes: lines and files."""
    install(session, *group("layers"))
    tool(session, "structure.weight", *session.posargs)


@nox.session(reuse_venv=True)
def planted(session: nox.Session) -> None:
    """Plants bugs in a copy, one at a time, and fails if the tests miss one.

    All take an hour or two; words after ``--`` select those whose names or files
    contain one of them, as in ``nox -s planted -- tw-reduce``.
    """
    install(session, *editable(*PACKAGES), *group("test"))
    env = {**ENV, "PYTHONPATH": str(ROOT / "integration_tests")}
    session.run("python", "-m", "structure.planted", *session.posargs, env=env)


# A new environment of the standard library: a newcomer has its pip.
@nox.session(requires=["build"], reuse_venv=False, venv_backend="venv")
def pieces(session: nox.Session) -> None:
    """Installs each package alone, by its README's command, and runs its example.

    The packages, or those named as in ``-- tw-core``, are installed and removed one
    after the other; TensorFlow stays, so all must require the same third parties.
    """
    # Compiling all of TensorFlow would take as long as the rest; importing it does so.
    env = {"PYTHONPATH": None, "PIP_COMPILE": "0"}
    everywhere = third_parties(PACKAGES[0])
    if find_spec("uv"):  # Before pip, which then finds TensorFlow: saves minutes.
        ahead = ("-m", "uv", "pip", "install", "--python", f"{session.bin}/python")
        session.run(sys.executable, *ahead, *everywhere, external=True, silent=True)
    for package in session.posargs or PACKAGES:
        needed = third_parties(*closure(package))
        # TensorFlow brings Keras, of which tw-keras only requires a later version.
        if [need for need in needed if not need.startswith("keras>")] != everywhere:
            session.error(f"{package} needs {needed}; {PACKAGES[0]} {everywhere}")
        readme = ROOT / "packages" / package / "README.md"
        [command] = re.findall("^pip install dist/.*", readme.read_text(), re.MULTILINE)
        session.run("sh", "-c", command, env=env, external=True, silent=True)
        # From an index it would be somebody else's, as ours are not published.
        frozen = re.findall("^(tw-.*?)(?: @ file:.*)?$", installed(session), re.M)
        if sorted(frozen) != sorted(closure(package)):
            session.error(f"{package}: {command} installs {frozen}")
        tool(session, "interfaces.pieces", readme)
        session.run("pip", "uninstall", "--yes", *closure(package), silent=True)


def installed(session: nox.Session) -> str:
    """Returns pip's list, one package per line."""
    return session.run("pip", "freeze", silent=True) or ""


@nox.session(reuse_venv=True)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def api(session: nox.Session, package: str) -> None:
    """Checks the frozen interfaces and the version; rewrites them with -- --write."""
    install(session, *group("api"))
    tool(session, "interfaces", "api", package, *session.posargs)


def run_planned(session: nox.Session, planner: str, package: str) -> None:
    """Makes a tool choose and build released wheels; runs the tests that it names.

    Third parties are current: they are installed first, and no sibling replaces them.
    """
    session.install(*group("release"))
    folder = Path(session.create_tmp()).resolve() / "planned"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tool(session, "interfaces", planner, package, folder)
    runs = json.loads((folder / "runs.json").read_text())
    if not runs:
        session.skip("nothing to prove, as said above")
    session.install(*third_parties(*closure(package)))
    freeze = ("python", "-m", "uv", "pip", "freeze", "--quiet")
    todays = folder / "third-parties.txt"
    todays.write_text(session.run(*freeze, silent=True) or "")
    for run in runs:
        root = Path(run["root"])
        needed = test_requirements(run["package"], root=root)
        session.install("--constraint", str(todays), *run["wheels"], *needed)
        command = ("pytest", f"packages/{run['package']}/tests", *session.posargs)
        with session.chdir(root):
            session.run(*command, env={**ENV, "PYTHONPATH": None})


@nox.session(requires=["build"], reuse_venv=False)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def compat(session: nox.Session, package: str) -> None:
    """Runs a package's tests with the oldest sibling releases that its bounds allow."""
    run_planned(session, "compat", package)


@nox.session(requires=["build"], reuse_venv=False)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def forward(session: nox.Session, package: str) -> None:
    """Runs the last released dependents' own tests with the current package."""
    run_planned(session, "forward", package)


@nox.session(requires=["build"], reuse_venv=False)
def released(session: nox.Session) -> None:
    """Runs the last release's READMEs and pages with the current packages.

    The release's bounds are ignored: features that it used may warn, but must work.
    """
    session.install(*group("release"))
    tree = Path(session.create_tmp()).resolve() / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tool(session, "interfaces", "released", tree)
    had = [own for own in PACKAGES if (tree / "packages" / own).is_dir()]
    session.install(*map(wheel, PACKAGES), *test_requirements(*had, root=tree))
    env = {**ENV, "PYTHONPATH": None}
    own = ("-W", "default", *session.posargs)
    # CONTRIBUTING.md is not a promise.
    (tree / "docs" / "CONTRIBUTING.md").unlink()
    with session.chdir(tree):
        session.run("pytest", *own, "integration_tests/test_readmes.py", env=env)


@nox.session(reuse_venv=True)
def release(session: nox.Session) -> None:
    """Writes changelogs, commits and tags, as in: -- tw-core. Publishes nothing."""
    install(session, *group("release"))
    said = tool(session, "interfaces", "release", *session.posargs, silent=True)
    named = re.findall("^release (\\S+) (\\S+)$", said, re.MULTILINE)
    for package, version in named:
        towncrier = ("towncrier", "build", "--yes", "--config", "pyproject.toml")
        folder = ("--dir", f"packages/{package}", "--name", package)
        session.run(*towncrier, *folder, "--version", version)
        cite(version)
    titles = [f"{package} {version}" for package, version in named]
    what = titles[0] if len(titles) == 1 else f"{len(titles)} packages"
    messages = ("--message", f"Release {what}", "--message", "\n".join(titles))
    session.run("git", "commit", "--all", *messages, external=True)
    for title in titles:
        git = ("git", "tag", "--annotate", "-m", title, title.replace(" ", "-v"))
        session.run(*git, external=True)


def cite(version: str) -> None:
    """Writes the last release's version and date into CITATION.cff."""
    dated = {"version": version, "date-released": datetime.date.today().isoformat()}
    text = Path("CITATION.cff").read_text()
    for key, value in dated.items():
        text = re.sub(f"(?m)^{key}: .*$", f'{key}: "{value}"', text)
    Path("CITATION.cff").write_text(text)


@nox.session(reuse_venv=True)
def tagged(session: nox.Session) -> None:
    """Builds the archives of a tag into out/release, as in: -- tw-core-v0.2.0."""
    install(session, *group("build"))
    package, _, version = session.posargs[0].rpartition("-v")
    folder = ROOT / "out" / "release" / package
    shutil.rmtree(folder, ignore_errors=True)
    build_archives(session, package, folder)
    if not list(folder.glob(f"{package.replace('-', '_')}-{version}-*.whl")):
        session.error(f"the tag says {version}; {package} is another version")


def build_site(session: nox.Session) -> None:
    """Builds the documentation into out/docs, each page as HTML and as Markdown."""
    for builder in ("html", "markdown"):  # the latter sees no changed source
        pages = ("-b", builder, "--write-all", *READ_ONCE, "docs", "out/docs")
        session.run("sphinx-build", "-W", "--keep-going", *pages, env=ENV)


@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Builds the documentation into out/docs, and runs the examples of docstrings."""
    install(session, *editable(*PACKAGES), *group("docs"), *group("test"))
    build_site(session)
    look = (f"integration_tests/test_docs_{name}.py" for name in ("site", "search"))
    site = {**ENV, "TOWERS_SITE": str(SITE)}
    session.run("pytest", "--noconftest", *look, env=site)
    doctest = ("-b", "doctest", *READ_ONCE, "docs", "out/doctest")
    session.run("sphinx-build", "-W", "--keep-going", *doctest, env=ENV)


@nox.session(reuse_venv=True)
def links(session: nox.Session) -> None:
    """Checks the documentation's external links; needs a network."""
    install(session, *editable(*PACKAGES), *group("docs"))
    linkcheck = ("-b", "linkcheck", "docs", "out/links")
    session.run("sphinx-build", "-W", "--keep-going", *linkcheck, env=ENV)


@nox.session(requires=["build"], reuse_venv=False)
def browser(session: nox.Session) -> None:
    """Builds the documentation, and tests it in Chromium."""
    groups = (*group("test"), *group("docs"), *group("browser"))
    install(session, *map(wheel, PACKAGES), *groups)
    build_site(session)
    session.run(
        *("pytest", "integration_tests/test_docs_browser.py", *session.posargs),
        env={**ENV, "PYTHONPATH": None, "TOWERS_SITE": str(SITE)},
    )


@nox.session(name="format", reuse_venv=True)
def format_code(session: nox.Session) -> None:
    """Reformats the code, and fixes findings of ``lint`` where a tool can."""
    install(session, *group("lint"))
    session.run("ruff", "check", "--fix", "--exit-zero")
    session.run("ruff", "format")


@nox.session(reuse_venv=True)
def train(session: nox.Session) -> None:
    """Trains a model on handwritten digits; arguments after -- go to the script."""
    install(session, *editable(*PACKAGES), *group("examples"))
    # Ctrl-C reaches the script as well as nox, which then waits for its last save.
    session.run(
        *("python", "docs/examples/train_digits.py", *session.posargs),
        env=ENV,
        interrupt_timeout=60,
        terminate_timeout=10,
    )


@nox.session(name="train-rl", reuse_venv=True)
def train_rl(session: nox.Session) -> None:
    """Trains agents with PPO; arguments after -- go to the script."""
    install(session, *editable(*PACKAGES), *group("rl"))
    session.run(
        *("python", "docs/examples/ppo/train.py", *session.posargs),
        env=ENV,
        interrupt_timeout=60,
    )


@nox.session(reuse_venv=True)
def faults(session: nox.Session) -> None:
    """Kills, stops and cuts off tasks of clusters; times the resulting errors.

    Cutting links and hosts needs root, iproute2 and nftables; otherwise it is skipped.
    """
    install(session, *editable(*PACKAGES), *test_requirements("tw-syncrep"))
    tool(session, "lab.faults.run", *session.posargs, interrupt_timeout=30)


@nox.session(requires=["build"], reuse_venv=False)
@nox.parametrize("client", CLIENTS, ids=CLIENTS)
def clients(session: nox.Session, client: str) -> None:
    """Trains with another project's trainers; compares with that project alone."""
    session.install(*map(wheel, PACKAGES), *group(f"client-{client}"))
    program = f"lab.clients.{client}"
    tool(session, program, *session.posargs, interrupt_timeout=10)


@nox.session(reuse_venv=True)
def soak(session: nox.Session) -> None:
    """Trains for half an hour while tasks are killed; shorter with -- --minutes 2."""
    install(session, *editable(*PACKAGES), *group("examples"))
    tool(session, "lab.soak.run", *session.posargs, interrupt_timeout=60)


@nox.session(reuse_venv=True)
def ray(session: nox.Session) -> None:
    """Trains on a Ray cluster on this machine, with tasks as actors."""
    session.install(*editable(*PACKAGES), *group("ray"))
    session.run(
        *("python", "docs/examples/cluster/ray_program.py"),
        *(session.posargs or ["--", "--steps", "101"]),
        env={**ENV, "RAY_USAGE_STATS_ENABLED": "0"},
        interrupt_timeout=60,
    )


def torch_python(session: nox.Session) -> str:
    """Returns a Python with PyTorch, without TensorFlow and our packages."""
    folder = Path(session.virtualenv.location) / "torch"
    python = folder / "bin" / "python"
    if not python.exists():
        session.run(
            "uv", "venv", "--python", str(session.python or "3.11"), str(folder)
        )
    wanted = group("bench-torch")
    session.run("uv", "pip", "install", "--quiet", "--python", str(python), *wanted)
    return str(python)


@nox.session(reuse_venv=True)
def bench(session: nox.Session) -> None:
    """Runs a benchmark by name, as in: nox -s bench -- reduce."""
    install(session, *editable(*PACKAGES), *group("bench"))
    if session.posargs[:1] == ["gpu"] and shutil.which("nvidia-smi"):
        install(session, "tensorflow[and-cuda]")
    peers = (
        ["--torch", torch_python(session)]
        if session.posargs[:1] == ["allreduce"]
        else []
    )
    session.run(
        *("python", f"{LAB}/benchmarks/run.py", *session.posargs, *peers),
        env=ENV,
        interrupt_timeout=10,
    )
