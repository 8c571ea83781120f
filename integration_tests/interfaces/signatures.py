"""Signatures as one line of text, however the source spreads them.

Annotations and defaults are written as the source names them; griffe parses them,
so that quotes, line breaks and trailing commas leave no trace.
"""

from collections.abc import Iterable

import griffe

_POSITIONAL = griffe.ParameterKind.positional_only
_KEYWORD = griffe.ParameterKind.keyword_only
_STARS = {
    griffe.ParameterKind.var_positional: "*",
    griffe.ParameterKind.var_keyword: "**",
}


def parameter_list(parameters: Iterable[griffe.Parameter]) -> str:
    """Writes parameters as between the parentheses of a ``def``."""
    texts: list[str] = []
    before = None
    for parameter in parameters:
        if before is _POSITIONAL and parameter.kind is not _POSITIONAL:
            texts.append("/")
        starred = before in (_KEYWORD, griffe.ParameterKind.var_positional)
        if parameter.kind is _KEYWORD and not starred:
            texts.append("*")
        texts.append(_parameter(parameter))
        before = parameter.kind
    if before is _POSITIONAL:
        texts.append("/")
    return ", ".join(texts)


def field_parameters(owner: griffe.Class) -> list[griffe.Parameter]:
    """Lists what a NamedTuple's fields make of its constructor."""
    return [
        griffe.Parameter(
            name,
            annotation=member.annotation,
            kind=griffe.ParameterKind.positional_or_keyword,
            default=member.value,
        )
        for name, member in owner.members.items()
        if isinstance(member, griffe.Attribute) and member.annotation is not None
    ]


def annotation_text(annotation: object, *, before: str) -> str:
    """Writes an annotation behind ``before``, or nothing where there is none."""
    return "" if annotation is None else f"{before}{unquoted(annotation)}"


def unquoted(annotation: object) -> str:
    """Writes an annotation or a type alias without the quotes of a late name."""
    text = str(annotation)
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


def _parameter(parameter: griffe.Parameter) -> str:
    text = _STARS.get(parameter.kind, "") + parameter.name  # type: ignore[arg-type]
    text += annotation_text(parameter.annotation, before=": ")
    if parameter.default is None or parameter.kind in _STARS:
        return text
    equals = " = " if parameter.annotation is not None else "="
    return f"{text}{equals}{_default(parameter.default)}"


def _default(value: object) -> str:
    """Writes a default, and for a constant of the package what it stands for.

    Otherwise the constant could change, and the line would not.
    """
    named = _resolved(value) if isinstance(value, griffe.ExprName) else None
    if isinstance(named, griffe.Attribute) and named.value is not None:
        return _default(named.value)
    return str(value)


def _resolved(name: griffe.ExprName) -> object:
    """Finds what a name stands for; None for builtins and for what lies elsewhere."""
    try:
        # griffe's type leaves functions, attributes and aliases out.
        found: object = name.resolved
        return found.final_target if isinstance(found, griffe.Alias) else found
    except (AttributeError, KeyError, griffe.GriffeError):
        return None
