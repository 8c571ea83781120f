"""Tables of names, with which the pages of the reference begin.

Read from the package's ``api.txt``: a line for each name of the package itself, and one
for the names of each of its public modules.
"""

import importlib
import inspect
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = ("alias", "class", "def", "value")


def find_names(interface: str) -> dict[str, list[str]]:
    """Lists the names of each module of an ``api.txt``, without members of classes."""
    lines = [line.split(" ", 2) for line in interface.splitlines()]
    modules = {words[1]: [] for words in lines if words[0] == "module"}
    for kind, rest, *_ in lines:
        module, _, name = rest.partition("(")[0].rstrip(":").rpartition(".")
        if kind in KINDS and module in modules:
            modules[module] += [name] * (name not in modules[module])  # overloads
    return {module: names for module, names in modules.items() if names}


def render(interface: str, page: str) -> str:
    """Returns the tables of a package; ``page`` describes its values."""
    (package, own), *rest = find_names(interface).items()
    rows = [(_link(package, name), _first_line(package, name, page)) for name in own]
    tables = [_table(("name", "what it is"), rows)]
    if rest:
        rows = [
            (
                f"`{module}`",
                ", ".join(
                    _link(package if name in own else module, name) for name in names
                ),
            )
            for module, names in rest
        ]
        tables.append(_table(("module", "its names"), rows))
    return "\n\n".join(tables) + "\n"


def _link(module: str, name: str) -> str:
    return f"{{py:obj}}`{name} <{module}.{name}>`"


def _first_line(module: str, name: str, page: str) -> str:
    """Returns a docstring's first sentence; of a value, that on the page."""
    found = getattr(importlib.import_module(module), name)
    if inspect.isclass(found) or inspect.isroutine(found):
        text = inspect.getdoc(found) or ""
    else:
        text = page.partition(f":: {name}\n")[2].partition("\n\n")[2]
        text = text.partition("\n```")[0]
    paragraph = text.partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("``", "`").replace("|", "\\|")


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *rows]
    return "\n".join(f"| {one} | {other} |" for one, other in lines)


def add_names(app, docname, source):
    """Adds the tables below the title of a page of the reference."""
    interface = ROOT / "packages" / docname.removeprefix("api/") / "api.txt"
    if docname.startswith("api/") and interface.is_file():
        app.env.note_dependency(str(interface))
        title, rest = source[0].split("\n", 1)
        source[0] = f"{title}\n\n{render(interface.read_text('utf-8'), rest)}{rest}"


def setup(app):
    """Writes the tables as Sphinx reads the pages."""
    app.connect("source-read", add_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
