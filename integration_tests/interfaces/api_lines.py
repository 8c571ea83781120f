"""A package's public interface as lines, one a public name, read from the source.

Public is what a module lists in ``__all__``, or what the stub beside it imports as
itself (``import name as name``), and without either what it defines without an
underscore; modules with an underscore are private. What a public name shows in its
turn, a class's methods, properties and fields, has lines of its own, those that it
inherits within its package included.

Nothing is imported: exports that load on first use are followed through the stub, or
through imports under TYPE_CHECKING.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import griffe

from interfaces.signatures import (
    annotation_text,
    field_parameters,
    parameter_list,
    unquoted,
)

# What these decorators do can be seen by a caller; of others only the result counts.
_SHOWN = (
    "abstractmethod",
    "classmethod",
    "contextmanager",
    "dataclass",
    "runtime_checkable",
    "staticmethod",
)
_HIDDEN_MAGIC = ("__init__", "__new__", "__post_init__", "__repr__", "__str__")


def interface_lines(module: str, sources: Path) -> list[str]:
    """Reads the interface of the top-level ``module`` in the folder ``sources``.

    Returns:
      Lines as ``def tw_core.map_towers(fn: ...) -> ...``, sorted by name.

    Raises:
      ValueError: names in ``__all__`` that nothing in the source defines.
    """
    package = griffe.load(module, search_paths=[sources], allow_inspection=False)
    if not isinstance(package, griffe.Module):
        raise ValueError(f"interface_lines: {module} is no module; name a package.")
    lines = {
        line for public in _public_modules(package) for line in _module_lines(public)
    }
    return sorted(lines, key=lambda line: (_name(line), line))


def _name(line: str) -> str:
    """Reads which name a line is about: the word behind its kind."""
    return re.split(r"[ (:]", line)[1]


def _public_modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for name, member in module.members.items():
        if isinstance(member, griffe.Module) and not name.startswith("_"):
            yield from _public_modules(member)


def _module_lines(module: griffe.Module) -> Iterator[str]:
    yield f"module {module.path}"
    names = _exported(module)
    missing = [name for name in names if name not in module.members]
    if missing:
        raise ValueError(
            f"{module.path}: __all__ lists {missing}, which nothing there defines or "
            f"imports; import them under TYPE_CHECKING too, or drop them."
        )
    for name in names:
        yield from _member_lines(f"{module.path}.{name}", module.members[name])


def _exported(module: griffe.Module) -> list[str]:
    source = module.filepath
    stub = source.with_suffix(".pyi") if isinstance(source, Path) else None
    if stub is not None and stub.exists():
        imports = ast.parse(stub.read_text()).body
        aliases = [a for n in imports if isinstance(n, ast.ImportFrom) for a in n.names]
        return [alias.name for alias in aliases if alias.asname == alias.name]
    if module.exports is not None:
        return [str(name) for name in module.exports]
    return [
        name
        for name, member in module.members.items()
        if not name.startswith("_") and not member.is_alias and not member.is_module
    ]


def _member_lines(path: str, member: griffe.Object | griffe.Alias) -> Iterator[str]:
    target = _target(member) if isinstance(member, griffe.Alias) else member
    if isinstance(target, griffe.Class):
        yield from _class_lines(path, target)
    elif isinstance(target, griffe.Function):
        yield from _function_lines(path, target)
    elif isinstance(target, griffe.Attribute):
        yield _attribute_line(path, target)
    elif isinstance(member, griffe.Alias) and target is None:
        yield f"alias {path} = {member.target_path}"


def _target(alias: griffe.Alias) -> griffe.Object | None:
    """Follows an alias; None where it leads out of the package."""
    try:
        return alias.final_target
    except (griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None


def _class_lines(path: str, owner: griffe.Class) -> Iterator[str]:
    bases = ", ".join(str(base) for base in owner.bases)
    is_tuple = bases == "NamedTuple"
    parameters = field_parameters(owner) if is_tuple else _constructor(owner)
    line = f"class {path}({parameter_list(parameters)})"
    yield line + (f" of {bases}" if bases else "") + _decorators(owner)
    for name, member in sorted(owner.all_members.items()):
        if _is_public(name, member):
            yield from _member_lines(f"{path}.{name}", member)


def _constructor(owner: griffe.Class) -> list[griffe.Parameter]:
    """Lists what a class is called with; ``__new__`` tells it without ``__init__``."""
    members = owner.all_members
    new = None if "__init__" in members else members.get("__new__")
    function = _target(new) if isinstance(new, griffe.Alias) else new
    if isinstance(function, griffe.Function):
        return list(function.parameters)[1:]
    return list(owner.parameters)[1:]


def _is_public(name: str, member: griffe.Object | griffe.Alias) -> bool:
    if name.startswith("__") and name.endswith("__"):
        return member.is_function and name not in _HIDDEN_MAGIC
    return not name.startswith("_")


def _function_lines(path: str, function: griffe.Function) -> Iterator[str]:
    for variant in function.overloads or [function]:
        parameters = parameter_list(variant.parameters)
        returns = annotation_text(variant.returns, before=" -> ")
        yield f"def {path}({parameters}){returns}{_decorators(function)}"


def _attribute_line(path: str, attribute: griffe.Attribute) -> str:
    if "property" in attribute.labels:
        returns = annotation_text(attribute.annotation, before=" -> ")
        setter = " @setter" if "writable" in attribute.labels else ""
        return f"property {path}{returns}{setter}"
    line = f"value {path}{annotation_text(attribute.annotation, before=': ')}"
    if "module-attribute" in attribute.labels or "class-attribute" in attribute.labels:
        is_alias = str(attribute.annotation) == "TypeAlias"
        value = unquoted(attribute.value) if is_alias else str(attribute.value)
        return line if attribute.value is None else f"{line} = {value}"
    return line


def _decorators(owner: griffe.Class | griffe.Function) -> str:
    texts = [str(decorator.value) for decorator in owner.decorators]
    shown = [text for text in texts if text.split("(")[0].rsplit(".", 1)[-1] in _SHOWN]
    return "".join(f" @{text}" for text in sorted(shown))
