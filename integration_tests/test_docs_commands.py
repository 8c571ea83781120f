"""The sessions, packages, paths and options that pages tell users to type exist."""

import ast
import re
import shlex
import tomllib

import pytest
from harness.docs_blocks import PAGES, READMES, ROOT, blocks, name

SHELL = {"sh", "bash", "console"}
LAB = ROOT / "integration_tests" / "lab"
TEXTS = [*READMES, *PAGES, LAB / "README.md"]
SESSION = re.compile(r"nox(?: -R)? -s ((?:\"[^\"]+\" ?|\w[\w-]* ?)+)")
MODULES = {
    "tw-launch": ["packages/tw-launch/src/tw_launch/_launcher/*.py"],
    "tw-doctor": [
        "packages/tw-doctor/src/tw_doctor/_machine/*.py",
        "packages/tw-keras/src/tw_keras/_doctor.py",
    ],
    "train": ["docs/examples/train_digits.py"],
    "train rl": ["docs/examples/ppo/train.py"],
    "bench": ["integration_tests/lab/benchmarks/*.py"],
    "faults": ["integration_tests/lab/faults/run.py"],
    "faults soak": ["integration_tests/lab/soak/run.py"],
    "api": ["integration_tests/interfaces/__main__.py"],
}
# What a session is told to do, where it does one thing or another.
WORD = re.compile(r"nox -s (?:docs|faults|siblings|train) -- ([a-z]+)")
NOXFILE = (ROOT / "noxfile.py").read_text()
OURS = re.compile(r"^(?:packages|docs|integration_tests)/[\w./*-]+$")


def sessions() -> set[str]:
    """Names of the sessions, read from noxfile.py without running it."""
    tree = ast.parse(NOXFILE)
    found = set()
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        for decorator in function.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            target = call.func if call else decorator
            if ast.unparse(target) != "nox.session":
                continue
            named = [k.value for k in call.keywords if k.arg == "name"] if call else []
            found.add(ast.literal_eval(named[0]) if named else function.name)
    return found


def bare(session):
    """A session's name without Python and parameter, as in "matrix-3.11(lowest)"."""
    return re.split(r"[-(]", session)[0]


def commands(path):
    """The command lines of a page's shell blocks, continued lines joined."""
    text = "\n".join(block.code for block in blocks(path) if block.info in SHELL)
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def options_of(program):
    """What a program's source says about options: ``--x`` or a field ``x``."""
    files = [file for path in MODULES[program] for file in ROOT.glob(path)]
    return "\n".join(file.read_text() for file in files)


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_the_sessions_that_a_page_names_exist(path):
    named = SESSION.findall(path.read_text().replace("\\\n", " "))
    wanted = {part for words in named for part in shlex.split(words)}
    known = sessions() | {"NAME"}
    unknown = {part for part in wanted if bare(part) not in known}
    assert not unknown, f"{path}: noxfile.py has no sessions {unknown}"
    ids = set(re.findall(r"\(([\w-]+)\)", " ".join(wanted)))
    clients = {path.stem for path in LAB.glob("clients/*.py")}
    assert ids <= clients | {"lowest", "newest", "nightly", "NAME"}, ids
    words = WORD.findall(path.read_text())
    assert [word for word in words if f'"{word}"' not in NOXFILE] == []


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_the_options_in_a_pages_commands_exist(path):
    for words in commands(path):
        own, theirs = split(words)
        program = own[0].rpartition("/")[2]
        if program in ("tw-doctor", "tw-launch"):
            check_options(program, own[1:], path)
        for session in [w for w in own if program == "nox" and w in MODULES]:
            told = " ".join([session, *theirs[:1]])
            check_options(told if told in MODULES else session, theirs, path)


def split(words):
    """A command's own words, and those behind ``--``."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def check_options(program, words, path):
    source = options_of(program)
    for word in (word for word in words if word.startswith("--")):
        field = word.removeprefix("--").partition("=")[0]
        known = f'"--{field}"' in source or f"    {field.replace('-', '_')}:" in source
        assert known, f"{path}: {program} has no option {word}"


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_the_paths_in_a_pages_commands_exist(path):
    for words in commands(path):
        for word in (word for word in words if OURS.match(word)):
            assert list(ROOT.glob(word)), f"{path}: {word} does not exist"


SPAN = re.compile(r"`((?:packages/|docs/|integration_tests/|tw_\w+/)[\w./*-]+)`")
TO_WRITE = re.compile(r"tw-x|\+\w")  # new files


def test_the_files_that_contributing_names_exist():
    named = SPAN.findall((ROOT / "docs" / "CONTRIBUTING.md").read_text())
    sources = "packages/*/src/"
    kept = [
        f"{sources * path.startswith('tw_')}{path}"
        for path in named
        if not TO_WRITE.search(path)
    ]
    assert len(kept) > 10
    assert [path for path in kept if not list(ROOT.glob(path))] == []


SIBLINGS = "packages/siblings.txt"
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in ROOT.glob("packages/*/pyproject.toml")
}
ROW = re.compile(r"^\| `([^`]+)` \| `(pip install .*)` \|$", re.MULTILINE)
# The last cell of a row that names what to install.
TO_INSTALL = re.compile(r"^\| .*\| ([^|]*`tw-[^|]*) \|$", re.MULTILINE)
NAMED = re.compile(r"`(tw-[\w,\[\]-]+)`")
BY_NAME = re.compile(r"pip install[^`\n]*?[\s\"'](tw[-_]\w+)")


def install_command(named):
    """What installs a package, with extras or without, as pip in a shell takes it."""
    return f"pip install -c {SIBLINGS} {shlex.quote(f'./packages/{named}')}"


def exists(named):
    """Whether a package, and each of its extras, is one of ours."""
    package, _, extras = named.removesuffix("]").partition("[")
    known = PROJECTS[package].get("optional-dependencies", {})
    return {*filter(None, extras.split(","))} <= {*known}


@pytest.mark.parametrize("package", PROJECTS)
def test_a_packages_readme_installs_it_alone_and_then_with_extras(package):
    text = (ROOT / "packages" / package / "README.md").read_text()
    plain, *more = (line for line in text.splitlines() if line.startswith("pip inst"))
    assert plain == install_command(package)
    named = [shlex.split(line)[-1].removeprefix("./packages/") for line in more]
    assert more == [install_command(one) for one in named]
    assert all(exists(one) and one.startswith(f"{package}[") for one in named)


def test_a_table_has_a_command_for_each_row_of_what_to_install():
    text = (ROOT / "docs" / "which-package.md").read_text()
    table = dict(ROW.findall(text))
    assert table == {named: install_command(named) for named in table}
    assert all(map(exists, table))
    named = {one for cell in TO_INSTALL.findall(text) for one in NAMED.findall(cell)}
    assert {*PROJECTS} | named == {*PROJECTS} | {*table}
    assert len(named) > len(PROJECTS)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_the_pages_install_packages_as_the_readmes_do(path):
    lines = [words for words in commands(path) if "install" in words]
    ours = [words for words in lines if "packages/" in words[-1]]
    right = [
        words for words in ours if words[:-1] == ["pip", "install", "-c", SIBLINGS]
    ]
    assert ours == right
    assert all(exists(words[-1].removeprefix("./packages/")) for words in ours)


def test_nothing_tells_to_install_a_package_by_its_name_alone():
    """An index may hold somebody else's under the name, as ours are not published."""
    told = {}
    for path in [*TEXTS, *ROOT.glob("packages/*/src/**/*.py")]:
        text = re.sub(r'"\n *f?"', "", path.read_text())  # a string over several lines
        told[name(path)] = BY_NAME.findall(text)
    assert not {path: found for path, found in told.items() if found}


def test_the_shell_blocks_are_seen():
    assert any("nox" in words[0] for words in commands(ROOT / "docs/CONTRIBUTING.md"))
    assert {"tests", "docs", "train", "format"} <= sessions()
