"""Texts generated from the schema: the help of `train`, the JSON schema for editors, and a config with comments.

    python -m titanlite config schema > train_configs/schema.json

scripts/reference.py makes the site's page of all options from the same tables.
"""

import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticUndefined
from pydantic_core.core_schema import WithDefaultSchema

from titanlite.config.schema import Config

Node = dict[str, Any]
"""A part of a JSON schema."""

BASE = "Path of a TOML file to inherit from, relative to this one: it gives the keys that this file does not set."


class Option(NamedTuple):
    """One key of a section."""

    key: str
    """Name with its section: training.steps. N stands for the number of an entry in a list."""
    type: str
    default: str
    """Words for the default: default 1000, required, not set by default."""
    description: str

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


class Table(NamedTuple):
    """One section with keys of its own."""

    header: str
    description: str
    options: list[Option]


# JSON schema


class _WithFactories(GenerateJsonSchema):
    """JSON schema generator that includes the defaults of default factories, such as empty lists."""

    def default_schema(self, schema: WithDefaultSchema) -> Node:
        node = super().default_schema(schema)
        factory: Any = schema.get("default_factory")
        return {**node, "default": self.encode_default(factory())} if factory else node


def json_schema() -> Node:
    """Return the JSON schema (draft 2020-12) of the TOML file."""
    schema = _as_toml_has_it(Config.model_json_schema(schema_generator=_WithFactories))
    schema["properties"] = {"base": {"type": "string", "minLength": 1, "description": BASE}, **schema["properties"]}
    top = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Config of titanlite"}
    return top | schema


def json_schema_text() -> str:
    """Return the text of train_configs/schema.json."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _as_toml_has_it(node: Any) -> Any:
    """Remove null, which TOML lacks, and titles, which only repeat names; put each description on one line."""
    if isinstance(node, list):
        return [_as_toml_has_it(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    node = {key: _as_toml_has_it(value) for key, value in node.items() if key != "title" or not isinstance(value, str)}
    if isinstance(description := node.get("description"), str):
        node["description"] = " ".join(description.split())
    if isinstance(branches := node.get("anyOf"), list):
        branches = [branch for branch in branches if branch != {"type": "null"}]
        node = {key: value for key, value in node.items() if key != "anyOf"}
        node = {**branches[0], **node} if len(branches) == 1 else {"anyOf": branches, **node}
    if "default" in node and (node["default"] is None or "$ref" in node):
        del node["default"]
    return node


# Tables of options


def tables() -> list[Table]:
    """Return every section that has keys of its own, with those keys."""
    schema = json_schema()
    return list(_tables(schema, "", "", schema["$defs"]))


def _tables(node: Node, header: str, prefix: str, definitions: Node) -> Iterator[Table]:
    options: list[Option] = []
    inner: list[Table] = []
    for name, option in node["properties"].items():
        key = prefix + name
        entry = option.get("items", {})
        if "$ref" in option:
            inner += _tables(_definition(option, definitions), f"[{key}]", f"{key}.", definitions)
            continue
        default = "required" if name in node.get("required", ()) else _default(option)
        options.append(Option(key, type_words(option), default, option.get("description", "")))
        if "$ref" in entry:
            inner += _tables(_definition(entry, definitions), f"[[{key}]]", f"{key}.N.", definitions)
    if options:
        yield Table(header, node.get("description", ""), options)
    yield from inner


def _definition(node: Node, definitions: Node) -> Node:
    return definitions[node["$ref"].rpartition("/")[2]]


def _default(option: Node) -> str:
    if "default" in option:
        return f"default {toml_text(option['default'])}"
    described = re.search(r"Default: (.+?)\.?$", " ".join(option.get("description", "").split()))
    return f"default: {described[1]}" if described else "not set by default"


def type_words(node: Node) -> str:
    """Return a type in words: integer >= 1."""
    if "anyOf" in node:
        return " | ".join(map(type_words, node["anyOf"]))
    if "const" in node or "enum" in node:
        return " | ".join(toml_text(value) for value in node.get("enum") or [node["const"]])
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = " and ".join(f"{sign} {node[name]:g}" for name, sign in signs.items() if name in node)
    match node.get("type"):
        case "array":
            items = node.get("items", {})
            return "list of tables" if "$ref" in items else f"list of {type_words(items)}"
        case kind:
            names = {"string": "text", "boolean": "true | false", "object": "table", None: "table"}
            return f"{names.get(kind, kind)} {limits}".strip()


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, on one line."""
    text = " ".join(text.split())
    return re.split(r"(?<=\.)\s+(?![a-z])", text, maxsplit=1)[0]


# Help


def options_help() -> str:
    """Return the help: every option as it is set on the command line, by section."""
    lines = []
    for table in tables():
        if not table.header:
            continue
        lines += ["", table.header]
        for option in table.options:
            lines += [f"  --{option.key}  {option.type}; {option.default}"]
            description = textwrap.wrap(first_sentence(option.description), 112)
            lines += textwrap.indent("\n".join(description), " " * 8).splitlines()
    return "\n".join(lines) + "\n"


# A config with comments


def show(config: Config, *, only_changes: bool = False) -> str:
    """Return TOML that loads to the same config, with the description of each option as a comment.

    Args:
        only_changes: write only options that differ from their defaults, with the default as the comment.
    """
    return "\n".join(_section_lines(config, "", "", only_changes)).strip() + "\n"


def _section_lines(section: BaseModel, header: str, key: str, only_changes: bool) -> Iterator[str]:
    """Yield the lines of a section. Its own keys come before its inner sections: TOML gives later keys to those."""
    lines: list[str] = []
    inner: list[str] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        default = field.get_default(call_default_factory=True)
        if only_changes and value == default:
            continue
        path = f"{key}.{_bare(name)}" if key else _bare(name)
        wrapped = textwrap.wrap(first_sentence(field.description or ""), 118)
        comment = [] if only_changes else [f"# {line}" for line in wrapped]
        was = _default_comment(default) if only_changes else ""
        if isinstance(value, BaseModel):
            inner += _section_lines(value, f"[{path}]", path, only_changes)
        elif isinstance(value, dict):
            inner += ["", *comment, f"[{path}]  {was}".rstrip()]
            inner += [f"{_bare(own)} = {toml_text(entry)}" for own, entry in value.items()]
        elif isinstance(value, list) and value and all(isinstance(entry, BaseModel) for entry in value):
            for entry in value:
                inner += _section_lines(entry, f"[[{path}]]", path, only_changes)
        elif value is None:
            lines += [*comment, f"# {name} is not set"]
        else:
            lines += [*comment, f"{_bare(name)} = {toml_text(value)}  {was}".rstrip()]
    if header and (lines or header.startswith("[[") or not inner):
        yield from ("", header)
    yield from lines
    yield from inner


def _default_comment(default: Any) -> str:
    if default is PydanticUndefined:
        return ""
    return f"# default: {'not set' if default is None else toml_text(default)}"


def _bare(name: str) -> str:
    import tomlkit

    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else tomlkit.item(name).as_string()


def toml_text(value: Any) -> str:
    """Return a value as TOML on one line."""
    import tomlkit

    if isinstance(value, dict):
        return "{" + ", ".join(f"{_bare(name)} = {toml_text(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, BaseModel):
        return toml_text(value.model_dump(exclude_none=True))
    return tomlkit.item(value).as_string()
