"""Each page as Markdown beside its HTML, and ``llms.txt``, which lists the pages.

For programs that read: language models, and people with a terminal. The pages are
written by sphinx-markdown-builder, into the folder of the site. ``llms.txt`` is as
https://llmstxt.org has it: a title, what the project is, and a link and a line for each
page, in the sections of the site's own table of contents.
"""

import html
import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx_markdown_builder.translator import MarkdownTranslator

BUILDER = "markdown"
# What may be left out where room is short, to which the convention gives a name.
OPTIONAL = {"Background": "Optional"}
NOTE_LENGTH = 160


class Translator(MarkdownTranslator):
    """Writes Markdown that is read as it is, and belongs to a site in HTML."""

    def visit_abbreviation(self, node):
        """Keeps the ``*`` and ``/`` of signatures."""

    def depart_abbreviation(self, node):
        pass

    def visit_literal_emphasis(self, node):
        """Leaves types plain, whose every bracket would be emphasised by itself."""

    def depart_literal_emphasis(self, node):
        pass

    def visit_image(self, node):
        """Points at the picture that the HTML pages show."""
        env = self.builder.env
        up = "../" * self.builder.current_doc_name.count("/")
        picture = f"{up}_images/{env.images[node['uri']][1]}"
        self.add(f"![{node.get('alt', '')}]({picture})")


def write_list(app, exception):
    """Writes ``llms.txt``, when the pages are written."""
    if exception or app.builder.name != BUILDER:
        return
    root = app.config.root_doc
    index = app.env.get_doctree(root)
    lines = [f"# {app.config.project}", "", f"> {_first_paragraph(index)}", ""]
    lines += ["## Start", "", _entry(app, root)]
    for toctree in index.findall(addnodes.toctree):
        caption = OPTIONAL.get(toctree["caption"], toctree["caption"])
        if f"## {caption}" not in lines:
            lines += ["", f"## {caption}", ""]
        for _, name in toctree["entries"]:
            lines += [_entry(app, name), *_below(app, name)]
    Path(app.outdir, "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")


def _entry(app, name):
    title = app.env.titles[name].astext()
    note = _first_sentence(_first_paragraph(app.env.get_doctree(name)))
    return f"- [{title}]({name}.md)" + (f": {note}" if note else "")


def _below(app, name):
    trees = app.env.get_doctree(name).findall(addnodes.toctree)
    return [_entry(app, below) for tree in trees for _, below in tree["entries"]]


def _first_paragraph(doctree):
    """Returns the text of the first paragraph of the page's own, or nothing."""
    for paragraph in doctree.findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section | addnodes.desc_content):
            return " ".join(paragraph.astext().split())
    return ""


def _first_sentence(text):
    sentence = re.split(r"(?<=[.?])\s+(?=[A-Z`])", text)[0].rstrip(":")
    if len(sentence) <= NOTE_LENGTH:
        return sentence
    return sentence[:NOTE_LENGTH].rpartition(" ")[0].rstrip(",;:") + " …"


def name_twin(app, pagename, templatename, context, doctree):
    """Has a page's HTML name the same page in Markdown, and say what it is about."""
    if doctree is not None:
        twin = f"{pagename.rpartition('/')[2]}.md"
        link = f'<link rel="alternate" type="text/markdown" href="{twin}">'
        about = html.escape(_first_sentence(_first_paragraph(doctree)))
        described = f'<meta name="description" content="{about}">' if about else ""
        context["metatags"] = context.get("metatags", "") + link + described


def setup(app):
    """Adds the builder ``markdown``."""
    app.setup_extension("sphinx_markdown_builder")
    app.set_translator(BUILDER, Translator)
    app.connect("build-finished", write_list)
    app.connect("html-page-context", name_twin)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
