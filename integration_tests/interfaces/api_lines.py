"""A package's public interface as lines, one per public name, read from the source.

What is public, what a class inherits and how a signature is written is griffe's to say.
Nothing is imported: exports that load on first use are those of the module's stub,
whose ``from home import name as name`` makes a name public.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

# What these decorators do can be seen by a caller; of others only the result counts.
_SHOWN = (
    "abstractmethod",
    "classmethod",
    "contextmanager",
    "dataclass",
    "runtime_checkable",
    "staticmethod",
)
INTERNAL = "internal"
"""The module of a package that siblings may import, and users should not."""

Faces = tuple[griffe.Module, griffe.Module | None]
"""The front of a package, and its ``internal``."""

_HIDDEN_MAGIC = ("__init__", "__new__", "__post_init__", "__repr__", "__str__")


class StubExports(griffe.Extension):
    """Makes public, to griffe, what the stubs of modules export."""

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Reads the stubs of a package and of all modules in it."""
        stub = Path(pkg.filepath).with_suffix(".pyi")
        if stub.exists():
            nodes = ast.parse(stub.read_text()).body
            names = [a for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names]
            pkg.exports = [one.name for one in names if one.asname == one.name]
        for module in pkg.modules.values():
            if not module.is_alias:  # A module that another one imports.
                self.on_package(pkg=module)


def load(module: str, sources: Path) -> Any:
    """Reads the source of a package, ``module``, in the folder ``sources``."""
    extensions = griffe.load_extensions(StubExports)
    options: dict[str, Any] = {"allow_inspection": False, "extensions": extensions}
    return griffe.load(module, search_paths=[sources], **options)


def split(package: griffe.Module) -> Faces:
    """Takes the module ``internal`` out of a package."""
    if package.exports:
        package.exports = [n for n in package.exports if str(n) != INTERNAL]
    return package, package.members.pop(INTERNAL, None)  # type: ignore[return-value]


def interface_lines(face: griffe.Module | None) -> list[str]:
    """Writes lines as ``def tw_core.map_towers(fn: ...) -> ...``, sorted by name.

    ``ValueError`` names what is exported and nothing in the source defines.
    """
    lines = set(_lines(face.path, face)) if face else set()
    return sorted(lines, key=lambda line: (re.split(r"[ (:]", line)[1], line))


def _lines(path: str, member: Any) -> Iterator[str]:
    """Writes what is public as ``path``, and what it shows in its turn."""
    try:
        target = member.final_target if member.is_alias else member
    except (griffe.AliasResolutionError, griffe.CyclicAliasError):
        yield f"alias {path} = {member.target_path}"  # it leads out of the package
        return
    yield from (f"{kind} {path}{text}" for kind, text in _forms(target))
    if target.is_module or target.is_class:
        for name, inner in target.all_members.items():
            if inner.is_public and not _is_hidden(name, inner):
                yield from _lines(f"{path}.{name}", inner)


def _is_hidden(name: str, member: Any) -> bool:
    is_magic = name.startswith("__")
    return is_magic and (name in _HIDDEN_MAGIC or not member.is_function)


def _forms(member: Any) -> Iterator[tuple[str, str]]:
    """Writes the kind of a name, and what stands behind it; of overloads each."""
    has_type = getattr(member, "annotation", None) is not None
    if member.is_module:
        missing = set(map(str, member.exports or ())) - member.members.keys()
        if missing:
            raise ValueError(
                f"{member.path} exports {sorted(missing)}, which nothing there defines "
                f"or imports."
            )
        yield "module", ""
    elif member.is_class:
        bases = " of " * bool(member.bases) + ", ".join(map(str, member.bases))
        yield "class", _constructor(member) + bases + _decorators(member)
    elif member.is_function:
        for one in member.overloads or [member]:
            yield "def", _signature(one.parameters, one.returns) + _decorators(member)
    elif "property" in member.labels:
        setter = " @setter" if "writable" in member.labels else ""
        yield "property", f" -> {member.annotation}" * has_type + setter
    elif of_type := _type_of_descriptor(member):
        yield "property", f" -> {of_type}"
    else:
        is_shared = member.labels & {"module-attribute", "class-attribute"}
        value = f" = {member.value}" if is_shared and member.value is not None else ""
        if str(member.annotation) == "TypeAlias":
            value = " = " + str(member.value).strip("'\"")  # a late name
        yield "value", f": {member.annotation}" * has_type + value


def _type_of_descriptor(member: Any) -> str:
    """Writes the type of an attribute that is made as ``Own[type]()``, or nothing.

    ``Own`` is a class of the package with ``__get__``.
    """
    kind = getattr(member.value, "function", None)
    if not isinstance(kind, griffe.ExprSubscript):
        return ""
    owner = _found(kind.left)
    return str(kind.slice) if owner and "__get__" in owner.members else ""


def _found(name: Any) -> Any:
    """Returns what a name of the package stands for, or None."""
    try:
        named: Any = name.resolved if isinstance(name, griffe.ExprName) else None
        return named.final_target if named and named.is_alias else named
    except (AttributeError, KeyError, griffe.GriffeError):
        return None  # a builtin, or of elsewhere


def _constructor(owner: griffe.Class) -> str:
    """Writes what a class is called with."""
    members = owner.all_members
    if "__init__" not in members and "__new__" in members:
        parameters: Any = list(members["__new__"].parameters)[1:]  # type: ignore[union-attr]
    elif [str(base) for base in owner.bases] == ["NamedTuple"]:
        kind = griffe.ParameterKind.positional_or_keyword
        parameters = [
            griffe.Parameter(n, annotation=m.annotation, kind=kind, default=m.value)
            for n, m in owner.members.items()
            if isinstance(m, griffe.Attribute) and m.annotation is not None
        ]
    else:
        parameters = list(owner.parameters)[1:]
    return _signature(parameters)


def _signature(parameters: Any, returns: Any = None) -> str:
    # A function without a class around it, so that griffe leaves `self` in.
    written = [
        griffe.Parameter(
            one.name,
            annotation=one.annotation,
            kind=one.kind,
            default=one.default and _constant(one.default),
        )
        for one in parameters
    ]
    function = griffe.Function(
        "", parameters=griffe.Parameters(*written), returns=returns
    )
    return function.signature()


def _constant(value: Any) -> str:
    """Writes a default, and for a constant of the package what it stands for.

    Otherwise the constant could change, and the line would not.
    """
    named = _found(value)
    if named and named.is_attribute and named.value is not None:
        return _constant(named.value)
    return str(value)


def _decorators(owner: Any) -> str:
    texts = [str(one.value) for one in getattr(owner, "decorators", ())]
    shown = [text for text in texts if text.split("(")[0].rsplit(".", 1)[-1] in _SHOWN]
    return "".join(f" @{text}" for text in sorted(shown))
