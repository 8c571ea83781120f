"""Sessions that test, check, build and run the packages."""

import atexit
import datetime
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import chain
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
DURATIONS = ROOT / "integration_tests" / "durations.txt"
RAN: dict[str, dict[str, int]] = {}  # session -> how many tests passed, and wait
# The interpreters that TensorFlow supports, as far as they are present.
PYTHONS = [v for v in ("3.11", "3.12", "3.13") if shutil.which(f"python{v}")]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
# What users and tests do without; its README says when to run it.
LAB = ROOT / "integration_tests" / "lab"
CLIENTS = sorted(path.stem for path in LAB.glob("clients/*.py"))

# What the session `siblings` can run.
SIBLINGS = ("compat", "forward", "released")
# Which versions of others the session `matrix` takes.
VERSIONS = ("lowest", "newest", "nightly")

# Nightly builds that replace releases, to try coming versions.
NIGHTLY = {
    "tensorflow": "tf-nightly",
    "keras": "keras-nightly",
    "tf-keras": "tf-keras-nightly",
}
# A release's tag, such as tw-core-v0.2.0.
TAG = re.compile(r"tw-\w+-v\d\S*")
# How a README installs its package, and with which extras.
INSTALL = re.compile(r"^(pip install -c .* '?\./packages/[\w-]+(?:\[(.*)\]')?)$", re.M)
# The versions that the sessions of `nox` install, with hashes; `nox -s lock` writes it.
LOCK = ROOT / "constraints.txt"
NOX = ROOT / ".github" / "nox.txt"  # those of nox itself, where releases are built
# Groups of pyproject.toml in the lock; PyTorch, Ray and the clients are not.
LOCKED = (
    "test",
    "coverage",
    "examples",
    "index",
    "rl",
    "release",
    "horovod",
    "lint",
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


def dependencies(package: str, extras: Iterable[str] = ()) -> list[Requirement]:
    """Returns the requirements that ``package`` declares, and those of ``extras``."""
    project = nox.project.load_toml(f"packages/{package}/pyproject.toml")["project"]
    optional = (project["optional-dependencies"][extra] for extra in extras)
    return [Requirement(line) for line in chain(project["dependencies"], *optional)]


def third_parties(*packages: str) -> list[str]:
    """Returns the packages' requirements from outside, each line once."""
    needs = [need for package in packages for need in dependencies(package)]
    return sorted({str(need) for need in needs if need.name not in PACKAGES})


def closure(package: str, extras: Iterable[str] = ()) -> list[str]:
    """Returns ``package`` and all siblings that it requires, directly or not."""
    needed = [package]
    for name in needed:  # grows on the way
        needs = dependencies(name, extras if name == package else ())
        needed += sorted({need.name for need in needs} & {*PACKAGES} - {*needed})
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
    if not session.posargs:  # else it was a choice of them
        RAN[session.name] = json.loads(result.read_text())


@atexit.register
def say_what_passed() -> None:
    """Says in the last line what every change ran, and what else there is."""
    day = [RAN[name] for name in ("tests", "integration") if name in RAN]
    if len(day) == 2:
        counts = {key: sum(one[key] for one in day) for key in day[0]}
        took = float(DURATIONS.read_text().partition(" ")[0]) / 60
        print(
            f"{counts['passed']:,} quick tests passed. `nox -s full` runs "
            f"{counts['left_out']:,} more, in {took:.0f} minutes on two idle cores."
        )


@nox.session(reuse_venv=True)
def tests(session: nox.Session) -> None:
    """Runs the packages' quick tests, from the checkout; run it for every change.

    Doctests too. Words are pytest's, as in ``-- packages/tw-reduce/tests -k balanced``.
    """
    install(session, *editable(*PACKAGES), *test_requirements(*PACKAGES))
    run_tests(session, "--doctest-modules", *session.posargs)


@nox.session(reuse_venv=True)
def build(session: nox.Session) -> None:
    """Builds each package's sdist and wheel into dist/; runs before tests on wheels.

    ``-- tw-core-v0.2.0 https://HOST/OWNER/NAME`` builds what a tag names, into
    out/release: archives that link to the repository at this address, and a bill of
    what they run with.
    """
    install(session, *group("build"))
    # The words of a session that needs the wheels are passed to this one too.
    if tags := [word for word in session.posargs if TAG.fullmatch(word)]:
        addresses = [word for word in session.posargs if "://" in word]
        if len(addresses) != 1:
            session.error(
                "a tag needs the repository's address, https://HOST/OWNER/NAME"
            )
        for tag in tags:
            build_tagged(session, *tag.rsplit("-v", 1), *addresses)
        return
    # Where --no-install skips the builds, the archives stay.
    session.run_install("rm", "-rf", str(DIST), external=True, silent=True)
    for package in PACKAGES:
        build_archives(session, f"packages/{package}", DIST)


def build_tagged(
    session: nox.Session, package: str, version: str, address: str
) -> None:
    """Builds a package for an index into out/release, if it has the tag's version."""
    install(session, *group("index"))
    folder = ROOT / "out" / "release" / package
    shutil.rmtree(folder, ignore_errors=True)
    source = new_folder(session, "tagged")
    tool(session, "interfaces", "index", package, address, source)
    build_archives(session, str(source), folder)
    wheels = list(folder.glob(f"{package.replace('-', '_')}-{version}-*.whl"))
    if not wheels:
        session.error(f"the tag says {version}; {package} is another version")
    write_bill(session, package, wheels[0])


def write_bill(session: nox.Session, package: str, built: Path) -> None:
    """Writes what a wheel runs with beside it: its siblings, and the lock's versions.

    It is a software bill of materials in CycloneDX's format, of an environment that has
    nothing else.
    """
    folder = new_folder(session, "installed")
    uv, python = ("python", "-m", "uv"), str(folder / "bin" / "python")
    session.run(*uv, "venv", "--quiet", str(folder))
    siblings = [f"./packages/{name}" for name in closure(package)[1:]]
    session.run(
        *(*uv, "pip", "install", "--quiet", "--python", python),
        *("--constraints", str(LOCK), "--build-constraints", str(LOCK)),
        *(str(built), *siblings),
    )
    for origin in folder.glob("lib/*/*/tw_*/direct_url.json"):
        origin.unlink()  # the bill is not of this machine's folders
    bill = built.with_name(f"{built.name.rsplit('-py3', 1)[0]}.cdx.json")
    about = (
        "--pyproject",
        f"packages/{package}/pyproject.toml",
        "--mc-type",
        "library",
    )
    session.run("cyclonedx-py", "environment", *about, "-o", str(bill), python)


def build_archives(session: nox.Session, source: str, into: Path) -> None:
    """Builds an sdist of a package's folder, and its wheel from that."""
    python = str(Path(session.bin) / "python")
    here = ("--no-build-isolation", "--python", python, "--no-create-gitignore")
    # Other sessions install the wheels: --install-only must not skip this.
    session.run_install(
        *("python", "-m", "uv", "build", *here),
        *("--out-dir", str(into), source),
        silent=True,
    )


# Environments that hold wheels are recreated: a rebuilt wheel of an unchanged
# version would not be installed over the old one.


def install_wheels(session: nox.Session, *more: str) -> None:
    """Installs all packages from their wheels, and what the integration tests need."""
    groups = ("examples", "rl", "release", *more)
    needed = (*test_requirements(*PACKAGES), *(x for own in groups for x in group(own)))
    install(session, *map(wheel, PACKAGES), *needed)


@nox.session(requires=["build"], reuse_venv=False)
def integration(session: nox.Session) -> None:
    """Runs quick tests of the packages together, on wheels; run it for every change."""
    install_wheels(session, "horovod")
    named = any(word.startswith("integration_tests") for word in session.posargs)
    where = () if named else ("integration_tests",)
    run_tests(session, *where, *session.posargs, PYTHONPATH=None)


@nox.session(requires=["build"], reuse_venv=False)
def full(session: nox.Session) -> None:
    """Runs all cases of all tests, on wheels; run it by night, and before a release.

    As in ``-- tw-keras tw-ranks``: of these packages and of the integration tests that
    use them; ``-- gallery``: of the integration tests of that name. Arguments with a
    dash are pytest's, with values attached (``-kname``), but for ``--record``, which
    rewrites the file of durations.
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
@nox.parametrize("versions", VERSIONS, ids=VERSIONS)
def matrix(session: nox.Session, versions: str) -> None:
    """Tests with the oldest, newest and nightly dependencies; run it before a release.

    The packages' tests run by day's selection on each Python that is present. What
    passes becomes a row of docs/tested.md. Nightly builds of TensorFlow and Keras also
    run by night. It needs uv.
    """
    if session.venv_backend != "uv":
        session.error("matrix resolves with uv; install it with pip install 'nox[uv]'")
    needed = [*third_parties(*PACKAGES), *test_requirements(*PACKAGES)]
    if versions == "nightly":
        kept = [line for line in needed if Requirement(line).name not in NIGHTLY]
        session.install(*sorted(set(NIGHTLY.values())), *kept)
        session.install("--no-deps", *map(wheel, PACKAGES))
    else:
        # TensorFlow before 2.21 writes graphs that protobuf 7 does not support.
        bounds = Path(session.create_tmp()) / "bounds.txt"
        bounds.write_text("protobuf<7\n" if versions == "lowest" else "")
        resolution = "lowest-direct" if versions == "lowest" else "highest"
        # uv does not treat a wheel's requirements as direct: they must be named.
        session.install(
            *("--resolution", resolution, "--constraints", str(bounds)),
            *map(wheel, PACKAGES),
            *needed,
        )
    session.run("uv", "pip", "list")
    env = {**ENV, "PYTHONPATH": None}
    session.run("pytest", *at_once(4), *session.posargs, env=env)
    tool(session, "structure.tested", versions, *session.posargs)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Checks style, types, limits, wording and interfaces; run it for every change.

    Types in the programs of pages, imports between packages, versions and the forge's
    files are checked too.
    ``-- --sizes`` prints the packages' lines and files instead.
    """
    install(session, *group("lint"))
    if "--sizes" in session.posargs:
        tool(session, "structure.weight")
        return
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    # What users' checkers say of the programs of pages.
    tool(session, "structure.pages", "out/programs")
    session.run("mypy", "out/programs")
    session.run("pyright", "--project", "out/programs")
    tool(session, "structure.limits")
    sources = [str(ROOT / "packages" / package / "src") for package in PACKAGES]
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(sources)})
    tool(session, "interfaces", "api")
    for schema, patterns in FORGE_FILES.items():
        files = [str(path) for pattern in patterns for path in ROOT.glob(pattern)]
        session.run("check-jsonschema", "--builtin-schema", schema, *files)
    # Offline, it does not look up known vulnerabilities of pinned actions.
    session.run("zizmor", "--offline", "--quiet", ".github")


@nox.session(reuse_venv=True)
def api(session: nox.Session) -> None:
    """Checks interface files and versions; run it when a public name changes.

    ``-- tw-x --write`` rewrites the files of the packages named, or of all. ``--
    --version 1.1.0`` gives all packages this version, and bounds that begin with it.
    """
    install(session, *group("api"))
    tool(session, "interfaces", "api", *session.posargs)


@nox.session(reuse_venv=True)
def lock(session: nox.Session) -> None:
    """Rewrites constraints.txt and .github/nox.txt; run it when requirements change.

    A workflow does so every week. It is for every Python and platform, and needs uv.
    ``-- --keep`` keeps the versions that are in there already.
    """
    if session.venv_backend != "uv":
        session.error("lock resolves with uv; install it with pip install 'nox[uv]'")
    wanted = [*third_parties(*PACKAGES), *test_requirements(*PACKAGES)]
    wanted += [line for name in LOCKED for line in group(name)]
    listed = Path(session.create_tmp()) / "wanted.txt"
    newest = () if "--keep" in session.posargs else ("--upgrade",)
    for lines, into in ((wanted, LOCK), (group("nox"), NOX)):
        listed.write_text("".join(f"{line}\n" for line in sorted(set(lines))))
        session.run(
            *("uv", "pip", "compile", "--quiet", *newest),
            *("--universal", "--python-version", "3.11", "--generate-hashes"),
            *("--no-annotate", "--custom-compile-command", "nox -s lock"),
            *("--output-file", str(into), str(listed)),
            silent=True,
        )


@nox.session(reuse_venv=True)
def coverage(session: nox.Session) -> None:
    """Measures which branches a package's tests reach; run it when tests are removed.

    All packages, or those named as in ``-- tw-reduce``. It writes the rows of the table
    in docs/design/house.md; no number makes it fail.
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
def planted(session: nox.Session) -> None:
    """Plants bugs in a copy and fails if tests miss one; run it when tests are removed.

    Each bug is alone in its copy; all take up to 20 minutes. Words after ``--`` select
    those whose names or files contain one of them, as in ``-- tw-reduce``.
    """
    install(session, *editable(*PACKAGES), *group("test"))
    env = {**ENV, "PYTHONPATH": str(ROOT / "integration_tests")}
    session.run("python", "-m", "structure.planted", *session.posargs, env=env)


# A new environment of the standard library: a newcomer has its pip.
@nox.session(requires=["build"], reuse_venv=False, venv_backend="venv")
def pieces(session: nox.Session) -> None:
    """Installs packages alone, for their examples; run it when requirements change.

    Commands and examples are those of READMEs. The packages, or those named as in ``--
    tw-core``, are installed and removed one after the other; TensorFlow stays, so all
    must require the same third parties. ``-- tw-core --tests`` runs their tests too, on
    only the wheels that each requires; words after that are pytest's.
    """
    words = session.posargs
    at = words.index("--tests") if "--tests" in words else len(words)
    packages = words[:at] or PACKAGES
    # Compiling all of TensorFlow would take as long as the rest; importing it does so.
    env = {"PYTHONPATH": None, "PIP_COMPILE": "0"}
    everywhere = third_parties(PACKAGES[0])
    install_ahead(session, *everywhere)
    for package in packages:
        needed = third_parties(*closure(package))
        # TensorFlow brings Keras, of which tw-keras only requires a later version.
        if [need for need in needed if not need.startswith("keras>")] != everywhere:
            session.error(f"{package} needs {needed}; {PACKAGES[0]} {everywhere}")
        readme = ROOT / "packages" / package / "README.md"
        plain, *with_extras = INSTALL.findall(readme.read_text())
        install_told(session, package, *plain, env)
        tool(session, "interfaces.pieces", readme)
        for command, extras in with_extras:  # that examples do without
            install_told(session, package, command, extras, env)
        session.run("pip", "uninstall", "--yes", *PACKAGES, silent=True)
    # After all examples, which have nothing of what tests require.
    for package in packages if "--tests" in words else ():
        alone = (*map(wheel, closure(package)), *test_requirements(package))
        install_ahead(session, *alone)
        command = ("pytest", f"packages/{package}/tests", *words[at + 1 :])
        session.run(*command, env={**ENV, "PYTHONPATH": None})
        session.run("pip", "uninstall", "--yes", *closure(package), silent=True)


def install_told(
    session: nox.Session, package: str, command: str, extras: str, env: dict[str, Any]
) -> None:
    """Runs a README's command; it must install what the package requires, from here."""
    session.run("sh", "-c", command, env=env, external=True, silent=True)
    listed = session.run("pip", "freeze", silent=True) or ""
    # From an index it would be somebody else's, as ours are not published.
    frozen = re.findall("^(tw-.*?)(?: @ file:.*)?$", listed, re.MULTILINE)
    if sorted(frozen) != sorted(closure(package, filter(None, extras.split(",")))):
        session.error(f"{package}: {command} installs {frozen}")


def install_ahead(session: nox.Session, *needed: str) -> None:
    """Installs with the uv that nox has, if any: that saves minutes."""
    if not find_spec("uv"):
        session.install(*needed)
        return
    into = ("--python", f"{session.bin}/python")
    command = ("-m", "uv", "pip", "install", *into, *needed)
    session.run(sys.executable, *command, external=True, silent=True)


@nox.session(requires=["build"], reuse_venv=False)
def siblings(session: nox.Session) -> None:
    """Tests packages with other releases of their siblings; run it before a release.

    ``compat`` runs a package's tests with the oldest sibling releases that its bounds
    allow, ``forward`` the last released dependents' own tests with the current package,
    and ``released`` the last release's READMEs and pages with all current packages.
    Words choose, as in ``-- compat tw-x``; without any, all three run, of all packages.
    """
    kinds = [word for word in session.posargs if word in SIBLINGS] or SIBLINGS
    packages = [word for word in session.posargs if word in PACKAGES] or PACKAGES
    options = [w for w in session.posargs if w not in (*SIBLINGS, *PACKAGES)]
    session.install(*group("release"))
    for planner in (kind for kind in kinds if kind != "released"):
        for package in packages:
            run_planned(session, planner, package, options)
    if "released" in kinds:
        run_released(session, options)


def run_planned(
    session: nox.Session, planner: str, package: str, options: list[str]
) -> None:
    """Makes a tool choose and build released wheels; runs the tests that it names.

    Third parties are current: they are installed first, and no sibling replaces them.
    """
    folder = new_folder(session, "planned")
    folder.mkdir()
    tool(session, "interfaces", planner, package, folder)
    runs = json.loads((folder / "runs.json").read_text())
    if not runs:
        return
    session.install(*third_parties(*closure(package)))
    uv = ("python", "-m", "uv", "pip")
    todays = folder / "third-parties.txt"
    todays.write_text(session.run(*uv, "freeze", "--quiet", silent=True) or "")
    for run in runs:
        root = Path(run["root"])
        needed = test_requirements(run["package"], root=root)
        session.install("--constraint", str(todays), *run["wheels"], *needed)
        command = ("pytest", f"packages/{run['package']}/tests", *options)
        with session.chdir(root):
            session.run(*command, env={**ENV, "PYTHONPATH": None})
        # What follows may need another wheel of the same version.
        session.run(*uv, "uninstall", "--quiet", *PACKAGES, silent=True)


def run_released(session: nox.Session, options: list[str]) -> None:
    """Runs the last release's READMEs and pages with the current packages.

    The release's bounds are ignored: features that it used may warn, but must work.
    """
    tree = new_folder(session, "tree")
    tool(session, "interfaces", "released", tree)
    had = [own for own in PACKAGES if (tree / "packages" / own).is_dir()]
    needed = (*test_requirements(*had, root=tree), *group("examples", tree))
    session.install(*map(wheel, PACKAGES), *needed)
    # CONTRIBUTING.md is not a promise.
    (tree / "docs" / "CONTRIBUTING.md").unlink()
    command = ("pytest", "-W", "default", *options, "integration_tests/test_readmes.py")
    with session.chdir(tree):
        session.run(*command, env={**ENV, "PYTHONPATH": None})


def new_folder(session: nox.Session, name: str) -> Path:
    """Returns a path in the session's folder where nothing is left of a run before."""
    folder = Path(session.create_tmp()).resolve() / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder


@nox.session(reuse_venv=True)
def release(session: nox.Session) -> None:
    """Writes changelogs, commits and tags; run it to release packages: -- tw-core.

    ``-- all 1.1.0`` first writes this version and the bounds of siblings into all
    packages. It runs no tests and publishes nothing: the tag, once pushed, does.
    """
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
    # GitHub starts no workflow for more than three tags that are pushed at once.
    tags = " ".join(title.replace(" ", "-v") for title in titles)
    push = f"git push origin HEAD && for tag in {tags}; do git push origin $tag; done"
    session.log(f"To publish, in this order: {push}")


def cite(version: str) -> None:
    """Writes the last release's version and date into CITATION.cff."""
    dated = {"version": version, "date-released": datetime.date.today().isoformat()}
    text = Path("CITATION.cff").read_text()
    for key, value in dated.items():
        text = re.sub(f"(?m)^{key}: .*$", f'{key}: "{value}"', text)
    Path("CITATION.cff").write_text(text)


@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Builds and checks the site in out/docs; run it when pages or docstrings change.

    It runs the examples of docstrings too. ``-- browser`` also tests the site in
    Chromium; ``-- links`` checks its external links instead, and needs a network.
    """
    words = session.posargs
    extra = group("browser") if "browser" in words else ()
    install(session, *editable(*PACKAGES), *group("docs"), *group("test"), *extra)
    if "links" in words:
        build_pages(session, "linkcheck", "out/links")
        return
    for builder in ("html", "markdown"):  # the latter sees no changed source
        build_pages(session, builder, "out/docs", "--write-all")
    looks = ("site", "search", *(["browser"] if "browser" in words else []))
    files = (f"integration_tests/test_docs_{name}.py" for name in looks)
    site = {**ENV, "TOWERS_SITE": str(ROOT / "out" / "docs")}
    session.run("pytest", "--noconftest", *files, env=site)
    build_pages(session, "doctest", "out/doctest")


def build_pages(session: nox.Session, builder: str, into: str, *more: str) -> None:
    """Runs a builder of the documentation; the pages that one parsed, all share."""
    parsed = ("--doctree-dir", "out/doctrees")
    pages = ("-b", builder, *more, *parsed, "docs", into)
    session.run("sphinx-build", "-W", "--keep-going", *pages, env=ENV)


@nox.session(name="format", reuse_venv=True)
def format_code(session: nox.Session) -> None:
    """Reformats the code and fixes what tools can; run it before each commit."""
    install(session, *group("lint"))
    session.run("ruff", "check", "--fix", "--exit-zero")
    session.run("ruff", "format")


@nox.session(reuse_venv=True)
def train(session: nox.Session) -> None:
    """Trains a model on digits, or agents with PPO; run it to try the packages.

    The first word ``rl`` is for the agents; the others go to the program.
    """
    is_rl = session.posargs[:1] == ["rl"]
    program, needed = ("ppo/train", "rl") if is_rl else ("train_digits", "examples")
    install(session, *editable(*PACKAGES), *group(needed))
    # Ctrl-C reaches the program as well as nox, which then waits for its last save.
    session.run(
        *("python", f"docs/examples/{program}.py", *session.posargs[is_rl:]),
        env=ENV,
        interrupt_timeout=60,
        terminate_timeout=10,
    )


@nox.session(reuse_venv=True)
def faults(session: nox.Session) -> None:
    """Harms tasks of clusters and times the errors; run it when a wait changes.

    ``-- soak`` trains instead, half an hour or as in ``-- soak --minutes 2``, while
    tasks are killed. Cutting links and hosts needs root, iproute2 and nftables;
    otherwise it is skipped.
    """
    is_soak = session.posargs[:1] == ["soak"]
    needed = group("examples") if is_soak else test_requirements("tw-syncrep")
    install(session, *editable(*PACKAGES), *needed)
    program = "lab.soak.run" if is_soak else "lab.faults.run"
    tool(session, program, *session.posargs[is_soak:], interrupt_timeout=60)


@nox.session(requires=["build"], reuse_venv=False)
@nox.parametrize("client", CLIENTS, ids=CLIENTS)
def clients(session: nox.Session, client: str) -> None:
    """Compares with another project's trainers; runs by night, or at a new version."""
    session.install(*map(wheel, PACKAGES), *group(f"client-{client}"))
    program = f"lab.clients.{client}"
    tool(session, program, *session.posargs, interrupt_timeout=10)


@nox.session(reuse_venv=True)
def bench(session: nox.Session) -> None:
    """Runs a benchmark by name, as in -- reduce; run it when speed is changed."""
    install(session, *editable(*PACKAGES), *group("bench"))
    peers: tuple[str, ...] = ()
    if session.posargs[:1] == ["gpu"] and shutil.which("nvidia-smi"):
        install(session, "tensorflow[and-cuda]")
    elif session.posargs[:1] == ["allreduce"]:
        peers = ("--torch", torch_python(session))
    session.run(
        *("python", f"{LAB}/benchmarks/run.py", *session.posargs, *peers),
        env=ENV,
        interrupt_timeout=10,
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
