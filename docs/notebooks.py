"""Notebooks as pages: each is executed as the site is built, and shows its output."""

from pathlib import Path

import nbformat
from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from nbclient import NotebookClient

CELL_TIMEOUT_S = 180


class NotebookParser(MystParser):
    """Executes a notebook, and reads it as MyST Markdown with the output of its cells.

    An error or a cell that takes longer than ``CELL_TIMEOUT_S`` ends the build.
    """

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Parses the text of a notebook into ``document``."""
        notebook = nbformat.reads(inputstring, as_version=4)
        folder = str(Path(document["source"]).parent)
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources=resources).execute()
        super().parse("\n\n".join(map(_markdown, notebook.cells)), document)


def _markdown(cell: nbformat.NotebookNode) -> str:
    if cell.cell_type != "code":
        return cell.source
    said = "".join(
        out.text for out in cell.outputs if out.get("name") == "stdout"
    ).rstrip()
    code = f"```python\n{cell.source}\n```"
    return f"{code}\n\n```text\n{said}\n```" if said else code


def setup(app):
    """Has Sphinx read ``.ipynb``."""
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": False}
