"""Read the docstrings of symjax for the API reference: an extension of griffe.

- `softmax = ScoreMechanism("softmax", weights, description)` is shown as a function.
- The keys of a configuration, `key(default, meaning, …)`, are attributes of its groups.
- `Source:` becomes a separate paragraph, and aligned lines become a code block.
"""

import ast
import re
from collections.abc import Iterator

import griffe

ALIGNED = re.compile(r"^\S.*\S {2,}\S", re.MULTILINE)
SECTION = re.compile(r"\n(?=(?:Args|Attributes|Returns|Yields|Raises):\n)")
RAISES = re.compile(r"^Raises: (\S.*(?:\n[ \t]+\S.*)*)", re.MULTILINE)
SOURCE = re.compile(r"^Source: ((?:.*\n?)(?:[ \t]+\S.*\n?)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Prepare the docstrings of a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        for module, found in list(_mechanisms(pkg)):
            module.set_member(found.name, _function(found, pkg))
        for file in pkg["config"].modules.values():
            for group in file.classes.values():
                _describe_keys(group)
        _prepare(pkg)


def _mechanisms(module: griffe.Module) -> Iterator[tuple[griffe.Module, griffe.Object]]:
    """Yield the public score mechanisms of a module and of those in it."""
    for found in module.members.values():
        if found.is_alias:
            continue
        if found.is_module:
            yield from _mechanisms(found)
        elif found.is_attribute and _calls(found.value, "ScoreMechanism"):
            yield module, found


def _calls(value: object, name: str) -> bool:
    return isinstance(value, griffe.ExprCall) and str(value.function) == name


def _text(value: object) -> str:
    """Return the string that an expression writes, in one or several literals."""
    return ast.literal_eval(str(value))


def _function(found: griffe.Attribute, pkg: griffe.Module) -> griffe.Function:
    """Return a score mechanism as a function: its description, the common arguments."""
    call = pkg["attention.ScoreMechanism"].final_target["__call__"]
    function = griffe.Function(
        found.name,
        lineno=found.lineno,
        endlineno=found.endlineno,
        parameters=griffe.Parameters(*list(call.parameters)[1:]),
        returns=call.returns,
        parent=found.parent,
    )
    head, *rest = _text(found.value.arguments[2]).split("\n")
    described = "\n".join([head, *(line.removeprefix("    ") for line in rest)])
    description, source = re.split(r"(?=^Source:)", described, flags=re.M)
    text = f"{description}\n{call.docstring.value}\n{source}"
    function.docstring = _docstring(text, function, like=call.docstring)
    return function


def _docstring(
    text: str, parent: griffe.Object, *, like: griffe.Docstring
) -> griffe.Docstring:
    """Return a docstring that is parsed as another one is."""
    options = {"parser": like.parser, "parser_options": like.parser_options}
    return griffe.Docstring(text, parent=parent, **options)


def _describe_keys(group: griffe.Class) -> None:
    """List the keys of a group, with type, default and meaning, in its docstring."""
    keys = [x for x in group.attributes.values() if _calls(x.value, "key")]
    if not keys:
        return
    lines = [
        f"    {x.name} ({x.annotation}): {_text(x.value.arguments[1])} "
        f"(default `{x.value.arguments[0]}`)"
        for x in keys
    ]
    described = group.docstring.value if group.docstring else ""
    text = f"{described}\n\nAttributes:\n" + "\n".join(lines)
    group.docstring = _docstring(text, group, like=group.module.docstring)
    for found in keys:
        group.del_member(found.name)


def _prepare(found: griffe.Object) -> None:
    if found.docstring:
        found.docstring.value = prepared(found.docstring.value)
    for member in found.members.values():
        if not member.is_alias:
            _prepare(member)


def prepared(text: str) -> str:
    """Return a docstring whose sections, sources and tables Markdown keeps apart."""
    text = RAISES.sub(lambda x: f"Raises:\n    {' '.join(x[1].split())}", text)
    text = SECTION.sub("\n\n", text)
    text = SOURCE.sub(lambda x: f"\n**Source.** {' '.join(x[1].split())}\n", text)
    blocks = re.split(r"\n{2,}", text)
    return "\n\n".join(
        f"```text\n{x}\n```" if ALIGNED.search(x) and not x.startswith(" ") else x
        for x in blocks
    )
