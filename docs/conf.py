"""Settings of the site: ``nox -s docs`` builds it into ``out/docs``."""

import doctest
import os
import sys
from pathlib import Path

from docutils import nodes

sys.path.insert(0, str(Path(__file__).parent))  # this folder's extensions
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

project = "towers"
author = "The towers authors"
copyright = author  # the name that Sphinx wants
language = "en"

extensions = [
    "api_names",
    "error_pages",
    "myst_parser",
    "notebooks",
    "reference",
    "searching",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_reredirects",
    "twins",
]
templates_path = ["_templates"]
exclude_patterns = ["examples/**"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Each package's page documents what its `__all__` lists, in that order.
autoclass_content = "both"  # the class's docstring, then its constructor's
autodoc_member_order = "alphabetical"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Examples in docstrings use the public names without importing them.
doctest_global_setup = """
import numpy as np
from tw_ampopt import *
from tw_builders import *
from tw_core import *
from tw_core.contexts import *
from tw_core.devices import *
from tw_core.flat_variables import *
from tw_core.gradients import *
from tw_core.testing import *
from tw_core.variables import *
from tw_doctor import *
from tw_keras import *
from tw_launch import *
from tw_ranks import *
from tw_reduce import *
from tw_reduce.plans import *
from tw_reduce.reducers import *
from tw_rlload import *
from tw_syncrep import *
"""
doctest_default_flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "towers"
html_favicon = "_static/favicon.svg"
pygments_dark_style = "github-dark"  # furo's own underlines names as links
html_static_path = ["_static"]
html_css_files = ["towers.css"]
html_js_files = [(name, {"defer": "defer"}) for name in ("tables.js", "versions.js")]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_sidebars = {  # furo's own, and which version this is
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "versions.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_copy_source = False
# Messages had a page a package; an address of one still leads to it.
redirects = {
    f"errors/{package}": "messages.html"
    for package in (
        *("ampopt", "builders", "core", "doctor", "horovod", "keras", "launch"),
        *("ranks", "reduce", "rlload", "syncrep"),
    )
}
html_domain_indices = False
html_show_sphinx = False


def setup(app):
    app.connect("doctree-resolved", link_pictures)


def link_pictures(app, doctree, docname):
    """Links each picture to its full size; a phone shows the narrow one, if any."""
    if app.builder.format != "html":
        return
    for image in list(doctree.findall(nodes.image)):
        name = app.env.images[image["uri"]][1]
        root = "../" * docname.count("/")
        link = nodes.reference("", "", refuri=f"{root}_images/{name}")
        image.replace_self(link)
        link += image
        if (app.srcdir / "_static" / "phone" / name).exists():
            narrow = f'media="(max-width: 46em)" srcset="{root}_static/phone/{name}"'
            begin = f"<picture><source {narrow}>"
            link.insert(0, nodes.raw("", begin, format="html"))
            link += nodes.raw("", "</picture>", format="html")
