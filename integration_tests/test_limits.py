"""``nox -s lint`` refuses each fault of structure, planted in packages in miniature."""

import doctest
import re
import subprocess
from pathlib import Path

import pytest
from structure import limits
from structure.limits import RULES

ROOT_TOML = """
[tool.mypy]
mypy_path = [
  "$MYPY_CONFIG_FILE_DIR/packages/tw-low/src",
  "$MYPY_CONFIG_FILE_DIR/packages/tw-high/src",
]
[tool.importlinter]
root_packages = ["tw_low", "tw_high"]
[[tool.importlinter.contracts]]
layers = ["tw_high", "tw_low"]
[[tool.importlinter.contracts]]
containers = ["tw_low"]
layers = []
[[tool.importlinter.contracts]]
containers = ["tw_high"]
layers = []
[tool.towers.budgets]
tw-low = 100
tw-high = 100
"""
PROJECT = '[project]\nname = "{}"\nversion = "1.2.0rc1"\ndependencies = {}\n'
EXTRA = (
    PROJECT.format("tw-high", ["tw-low>=1.0,<2"])
    + '[project.optional-dependencies]\nmore = ["numpy", "{}"]\n'
)
LOW, HIGH = "packages/tw-low/src/tw_low", "packages/tw-high/src/tw_high"
LOW_TOML, HIGH_TOML = (
    "packages/tw-low/pyproject.toml",
    "packages/tw-high/pyproject.toml",
)
TREE = {
    "pyproject.toml": ROOT_TOML,
    "packages/siblings.txt": "# From here.\n"
    "tw-low @ file://${PWD}/packages/tw-low\n"
    "tw-high @ file://${PWD}/packages/tw-high\n",
    LOW_TOML: PROJECT.format("tw-low", "[]"),
    HIGH_TOML: PROJECT.format("tw-high", ["tw-low>=1.0,<2", "numpy"]),
    f"{LOW}/__init__.py": "",
    f"{LOW}/__init__.pyi": "from ._work import work as work\n",
    f"{LOW}/_work.py": "def work(): ...\n",
    f"{LOW}/internal.py": "",
    f"{HIGH}/__init__.py": "from tw_low import work\n",
    f"{HIGH}/_room/__init__.py": "",
    f"{HIGH}/_room/__init__.pyi": "from ._a import a as a\n",
    f"{HIGH}/_room/_a.py": "",
}
SECTIONS = 'def _work():\n    """Works.\n\n    Returns:\n      Nothing.\n    """\n'
INTERNAL = {f"{HIGH}/_b.py": "from tw_low import internal\n"}
# What is planted: files, and what is said.
FAULTS = {
    "weight": ({f"{LOW}/_work.py": "#\n" * 104}, "tw-low has 104 lines, more than 3 %"),
    "crowd": (
        {f"{LOW}/_{n}.py": "" for n in range(11)},
        "src/tw_low has 14 files; at most 13",
    ),
    "circle": (
        {
            f"{HIGH}/_room/_a.py": "def a():\n    from tw_high._b import b\n",
            f"{HIGH}/_b.py": "from tw_high._room import a\n",
        },
        "tw-high: these modules import each other: tw_high._b, tw_high._room._a.",
    ),
    "private name": (
        {f"{HIGH}/_b.py": "def b():\n    from tw_low._work import work\n"},
        "tw_high/_b.py:2 imports tw_low._work.work, which is private to tw-low",
    ),
    "private attribute": (
        {f"{HIGH}/_b.py": "import tw_low\n\ntw_low._work\n"},
        "tw_high/_b.py:3 imports tw_low._work, which is private to tw-low",
    ),
    "private member": (
        {f"{HIGH}/_keras_compat.py": "", f"{HIGH}/_b.py": "self._a = model.x._slots\n"},
        "^[^\n]*tw_high/_b.py:1 uses _slots, a private member of another [^\n]*$",
    ),
    "private member by its name": (
        {f"{HIGH}/_keras_compat.py": "", f"{HIGH}/_b.py": "getattr(x, '_slots', 0)\n"},
        "tw_high/_b.py:1 uses _slots, a private member of another",
    ),
    "foreign test": (
        {"packages/tw-low/tests/test_a.py": "import tw_high\n"},
        "tests/test_a.py:1 imports tw_high, which tw-low does not need",
    ),
    "arrow up": (
        {f"{LOW}/_work.py": "def work():\n    import tw_high\n"},
        "tw-low imports tw-high; its pyproject.toml must list it",
    ),
    "arrow up that is asked for": (
        {LOW_TOML: PROJECT.format("tw-low", ["tw-high>=1,<2"])},
        "these packages need each other: .*tw-low -> tw-high",
    ),
    "idle need": (
        {f"{HIGH}/__init__.py": ""},
        "tw-high lists tw-low in pyproject.toml, and imports it nowhere",
    ),
    "internal by a wide bound": (
        INTERNAL,
        'tw-high imports tw-low\'s internal, .* "tw-low>=1.0,<1.3"; got',
    ),
    "front by a narrow bound": (
        {HIGH_TOML: PROJECT.format("tw-high", ["tw-low>=1.2,<1.3"])},
        'tw-high imports tw-low\'s front alone, .* "tw-low>=1.2,<2"; got',
    ),
    "extra by a narrow bound": (
        {HIGH_TOML: EXTRA.format("tw-low>=1.2,<1.3")},
        'tw-high: an extra must say "tw-low>=1.2,<2"; got "tw-low<1.3,>=1.2"',
    ),
    "front before 1.0 by a wide bound": (
        {
            LOW_TOML: PROJECT.format("tw-low", []).replace("1.2.0rc1", "0.3"),
            HIGH_TOML: PROJECT.format("tw-high", ["tw-low>=0.2,<1"]),
        },
        '"tw-low>=0.2,<0.4"; got',
    ),
    "sections": (
        {f"{LOW}/_work.py": SECTIONS},
        "_work.py:1 _work is private: one line",
    ),
    "wording of a page": (
        {"docs/a.md": "# A\n\n`is no code`. A rank\nbrings it.\n\n```\nalike\n```\n"},
        '^docs/a.md:4 "brings": write [^\n]*$',
    ),
    "what as a subject": (
        {"README.md": "A rank is late. What it sends is not added.\n"},
        'README.md:1 "What it sends is not added.": write a noun as the subject',
    ),
    "wording of a docstring": (
        {f"{LOW}/_work.py": '"""Works.\n\nThis is no tensor.\n"""\n'},
        '_work.py:3 "is no tensor": write "is not a"',
    ),
    "wording of a message": (
        {f"{LOW}/_work.py": 'alike = "alike"\nraise Error(f"{alike} come alike")\n'},
        '^[^\n]*_work.py:2 "alike": write [^\n]*$',
    ),
    "wording of a comment": (
        {f"{LOW}/_work.py": "x = 1  # Besides, it is late.\n"},
        '_work.py:1 "Besides": write',
    ),
    "lost file": (
        {"docs/design/a.md": "`_work.py`, `_room/`\nand `_room/_b.py` are here.\n"},
        "^docs/design/a.md:2 names _room/_b.py, which is neither a file or [^\n]*$",
    ),
    "lost name": (
        {"docs/design/a.md": "`_room`, `_a` and `_gone`, a member\n"},
        "^docs/design/a.md:1 names _gone, which is neither a file or [^\n]*$",
    ),
    "forgotten package": (
        {"packages/tw-new/pyproject.toml": PROJECT.format("tw-new", "[]")},
        r"layers must have \['tw_new'\] too(?s:.)*budgets must have \['tw-new'\] too"
        r"(?s:.)*siblings.txt must have \['tw-new @ [^ ]*/packages/tw-new'\] too",
    ),
}


def said_of(folder, files):
    for name, text in {**TREE, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return "\n".join(fault for rule in RULES for fault in rule(folder))


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_of_structure_is_refused(tmp_path, what):
    files, said = FAULTS[what]
    assert re.search(said, said_of(tmp_path, files))


def test_a_tree_without_faults_is_not(tmp_path):
    assert said_of(tmp_path, {}) == ""
    narrow = PROJECT.format("tw-high", ["tw-low>=1.2.0rc1,<1.3"])
    assert said_of(tmp_path, {**INTERNAL, HIGH_TOML: narrow}) == ""


def test_a_wording_passes_where_it_is_allowed_or_right(tmp_path):
    allowed = '[tool.towers]\nallowed_words = ["docs/a.md: is no word"]\n[tool.towers.b'
    root = ROOT_TOML.replace("[tool.towers.b", allowed)
    page = "What is late? There is no rank; this is no word.\n"
    assert said_of(tmp_path, {"pyproject.toml": root, "docs/a.md": page}) == ""


def test_a_stray_file_at_the_top_of_a_checkout_is_refused(tmp_path):
    top = '[tool.towers]\ntop_level = ["pyproject.toml", "packages"]\n[tool.towers.b'
    root = {"pyproject.toml": ROOT_TOML.replace("[tool.towers.b", top)}
    strays = {".gitignore": "out/\n", "out/a.txt": "", "trained.keras": "", "t/v2": ""}
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True, timeout=60)
    assert re.findall(
        "(?m)^(.*?) does not belong at the top level, which has pyproject.toml, pack",
        said_of(tmp_path, {**root, **strays}),
    ) == ["t", "trained.keras"]


def test_the_examples_hold():
    failed, tried = doctest.testmod(limits)
    assert (failed, tried > 0) == (0, True)


def test_names_in_graphs_and_profiles_begin_with_their_own_package():
    root = Path(__file__).parents[1]
    others = [
        (str(path.relative_to(root)), name[0])
        for path in root.glob("packages/*/src/*/**/*.py")
        for name in re.finditer(r'"(tw_[a-z]+)[._][\w.]+"', path.read_text())
        if name[1] != path.relative_to(root).parts[3]
    ]
    assert others == []
