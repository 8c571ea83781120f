"""Arguments in the reference: in a signature, types by name, described in place.

A docstring describes an argument once and says ``as for `name``` elsewhere; the pages
have the description in its place.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from sphinx.util.inspect import stringify_signature
from sphinx.util.typing import stringify_annotation

import tw_reduce
from tw_core import Tower
from tw_horovod import SyncBatchNormalization
from tw_keras import TowerModel
from tw_reduce.compression import Compressor
from tw_reduce.plans import Measured
from tw_reduce.reducers import Tensorlike, TowerTensors

# Types that have a name, which autodoc would write out.
TYPES = {
    tw_reduce.Reducer: "tw_reduce.Reducer",
    # Its form where tensors are not looked at.
    Callable[[Sequence[Sequence[Any]]], Sequence[Sequence[Any]]]: "tw_reduce.Reducer",
    Compressor: "tw_reduce.compression.Compressor",
    Measured: "tw_reduce.plans.Measured",
    Sequence[int | str | Tower]: "tw_core.devices.Devices",
    TowerTensors: "tw_reduce.reducers.TowerTensors",
    Tensorlike: "tw_reduce.reducers.Tensorlike",
}
_WRITTEN = {stringify_annotation(found, "smart"): f"~{TYPES[found]}" for found in TYPES}
_AS_FOR = re.compile(
    r"(?P<indent> +)(?P<name>\w+): as (?:for|in) ``(?P<other>[\w.]+)``"
)


def show_constructors(app):
    """Restores the signatures that those of Keras's ``__new__`` hide."""
    for shown in (TowerModel, SyncBatchNormalization):
        own = inspect.signature(shown.__init__)
        _, *parameters = own.parameters.values()
        shown.__signature__ = own.replace(parameters=parameters)


def show_arguments(app, what, name, obj, options, signature, returns):
    """Shows the arguments that a method hands to Keras; none for a protocol."""
    if what == "class" and getattr(obj, "_is_protocol", False):
        return "", returns
    keras_own = getattr(keras.Model, name.rpartition(".")[2], None)
    if name.startswith("tw_keras.TowerModel.") and "*args" in (signature or ""):
        own = inspect.signature(keras_own)
        _, *parameters = own.parameters.values()
        return stringify_signature(own.replace(parameters=parameters)), returns
    return None


def name_types(app, domain, objtype, content):
    """Writes the names of types, before autodoc writes types into the page.

    Keras has no types: a result of any type says nothing.
    """
    for types in app.env.current_document.autodoc_annotations.values():
        if types.get("return", "").endswith("typing.Any"):
            del types["return"]
        for argument, written in types.items():
            for expanded, name in _WRITTEN.items():
                written = written.replace(expanded, name)
            types[argument] = written


def describe_in_place(app, what, name, obj, options, lines):
    """Replaces ``as for `other``` by what ``other`` says of the argument."""
    text = "\n".join(lines)
    lines[:] = _AS_FOR.sub(lambda found: _described(found, obj), text).split("\n")


def _described(found: re.Match[str], obj: Any) -> str:
    entry = re.compile(
        rf"^(?P<indent> +){found['name']}: (?P<text>.+(?:\n(?P=indent) +\S.*)*)", re.M
    )
    for other in _look_up(found["other"], obj):
        for docstring in (other.__doc__, getattr(other, "__init__", other).__doc__):
            if said := entry.search(inspect.cleandoc(docstring or "")):
                text = " ".join(said["text"].split())
                start = f"{found['indent']}{found['name']}: "
                again = _AS_FOR.match(start + text)
                full = _described(again, other) if again else start + text
                return full.rstrip(".")
    return found[0]


def _look_up(name: str, obj: Any) -> Iterator[Any]:
    """Finds what a docstring names: in its class, its module or its package."""
    module = sys.modules[obj.__module__]
    package = sys.modules[obj.__module__.partition(".")[0]]
    owner = getattr(obj, "__qualname__", "").rpartition(".")[0]
    first, *rest = name.split(".")
    for home in (getattr(module, owner, None), obj, module, package):
        found = sys.modules.get(first) or getattr(home, first, None)
        for part in rest:
            found = getattr(found, part, None)
        if found is not None and found is not obj:
            yield found


def part_plurals(app, what, name, obj, options, lines):
    """Sets plurals, as in ``tf.function``s, off from their code word for docutils."""
    lines[:] = [re.sub(r"``(\S[^`]*)``(?=s\b)", r"``\1``\\ ", line) for line in lines]


def setup(app):
    """Works on what autodoc finds; before napoleon and autodoc, which come at 500."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("builder-inited", show_constructors)
    app.connect("autodoc-process-signature", show_arguments)
    app.connect("autodoc-process-docstring", describe_in_place, priority=300)
    app.connect("autodoc-process-docstring", part_plurals, priority=400)
    app.connect("object-description-transform", name_types, priority=300)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
