"""All options, with their types and defaults as text, from the JSON schema that pydantic makes; and the nearest option
to a key that does not exist."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel

from titanlite.runtime.errors import nearest_name
from titanlite.schema import Config

Node = dict[str, Any]
"""A part of a JSON schema."""


REMOVED: dict[str, tuple[Any, str]] = {
    "activation_checkpoint.per_block": ([], 'mode = "selective" recomputes cheap operators, or every n-th block'),
    "checkpoint.export_every": (0, "titanlite checkpoint export exports any checkpoint, also beside training"),
    "comm.compile_timeout_seconds": (1800, "comm.init_timeout_seconds also holds for the first two steps"),
    "data.sources.epochs": (None, "weights set the shares of sources, and training.epochs limits the passes over each"),
    "lora.quantize_base": ("none", 'freeze.dtype = "bfloat16" halves the weights that adapters do not train'),
    "metrics.loss_by_source": (False, "validation.sources gives the loss of each source"),
    "teacher.cache": (None, "the teacher runs in training; teacher.enable_cpu_offload keeps its weights on the host"),
    "teacher.fsdp_reshard_after_forward": ("always", "each unit of a teacher is freed after its forward"),
}
"""Options that are gone: their default, with which they are ignored (the config in the folder of an older run names
every option), and what to do instead."""


class Option(NamedTuple):
    """One key of a section."""

    key: str
    """Name with its section: training.steps. N stands for the number of an entry in a list."""
    node: Node
    is_required: bool

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def description(self) -> str:
        return " ".join(self.node.get("description", "").split())

    @property
    def type(self) -> str:
        return type_text(self.node)

    @property
    def default(self) -> str:
        """The default as text: default 1000, required, not set by default."""
        if self.is_required:
            return "required"
        if self.node["default"] is not None:
            return f"default {toml_text(self.node['default'])}"
        described = re.search(r"Default: (.+?)\.?$", self.description)
        return f"default: {described[1]}" if described else "not set by default"


class Table(NamedTuple):
    """One section with keys of its own."""

    header: str
    description: str
    options: list[Option]


@cache
def json_schema() -> Node:
    """Return the JSON schema of the resolved config."""
    return Config.model_json_schema()


def tables(node: Node | None = None, key: str = "", header: str = "") -> Iterator[Table]:
    """Yield every section that has keys of its own, with those keys.

    Args:
        node: the section. None: the whole config.
        key, header: of the section, in front of its options and in the TOML file.
    """
    node = node or json_schema()
    options: list[Option] = []
    inner: list[tuple[Node, str, str]] = []
    for name, option in node["properties"].items():
        path = f"{key}.{name}" if key else name
        if "$ref" in option:
            inner.append((_resolve(option), path, f"[{path}]"))
            continue
        options.append(Option(path, option, name in node.get("required", ())))
        if "$ref" in option.get("items", {}):
            inner.append((_resolve(option["items"]), f"{path}.N", f"[[{path}]]"))
    if options:
        yield Table(header, " ".join(node.get("description", "").split()), options)
    for section in inner:
        yield from tables(*section)


def _resolve(node: Node) -> Node:
    return json_schema()["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def type_text(node: Node) -> str:
    """Return a type as text: integer >= 1."""
    if "anyOf" in node:
        return " | ".join(type_text(branch) for branch in node["anyOf"] if branch != {"type": "null"})
    if "const" in node or "enum" in node:
        return " | ".join(toml_text(value) for value in node.get("enum") or [node["const"]])
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = " and ".join(f"{sign} {node[name]:g}" for name, sign in signs.items() if name in node)
    if node.get("type") == "array":
        return "list of tables" if "$ref" in node["items"] else f"list of {type_text(node['items'])}"
    names = {"string": "text", "boolean": "true | false", "object": "table"}
    return f"{names.get(node['type'], node['type'])} {limits}".strip()


def bare(name: str) -> str:
    """Return a key as TOML, in quotes where necessary."""
    import tomlkit

    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else tomlkit.item(name).as_string()


def toml_text(value: Any) -> str:
    """Return a value as TOML on one line."""
    import tomlkit

    if isinstance(value, dict):
        return "{" + ", ".join(f"{bare(name)} = {toml_text(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, BaseModel):
        return toml_text(value.model_dump(exclude_none=True))
    return tomlkit.item(value).as_string()


def dotted_keys(*, inside_lists: bool = False) -> Iterator[str]:
    """Yield every option as section.key.

    Args:
        inside_lists: include the keys of the tables in a list of tables, without the number of the table.
    """
    for option in (option for table in tables() for option in table.options):
        if inside_lists or ".N." not in option.key:
            yield option.key.replace(".N.", ".")


def expects_list(key: tuple[str, ...]) -> bool:
    """Return True if the schema allows a list at the key. A number in a key names an entry of a list."""
    node = json_schema()
    for part in key:
        node = node.get("properties", {}).get(part) or (node.get("items") if part.isdecimal() else None)
        if node is None:
            return False
        node = _resolve(node)
    return any(branch.get("type") == "array" for branch in node.get("anyOf", [node]))


def nearest_key(dotted: str) -> str | None:
    """Return the option or section probably intended: the same name in another section, else the closest spelling."""
    numbered, dotted = dotted, ".".join(part for part in dotted.split(".") if not part.isdecimal())
    options = list(dotted_keys(inside_lists=True))
    parents = (option.split(".")[:end] for option in options for end in range(1, option.count(".") + 1))
    sections = sorted({".".join(parts) for parts in parents})
    leaf = dotted.rpartition(".")[2]
    same_leaf = [name for name in options if name.rpartition(".")[2] == leaf]
    inside = [name for name in same_leaf if name.endswith(f".{dotted}")]  # such as float8.enable
    namesake = inside[0] if inside else nearest_name(dotted, same_leaf, cutoff=0.6 if len(same_leaf) > 1 else 0)
    of_same_depth = [name for name in options + sections if name.count(".") == dotted.count(".")]
    alike = [name for name in of_same_depth if nearest_name(leaf, [name.rpartition(".")[2]])]
    near = nearest_name(dotted, alike, cutoff=0.8)  # whole keys of one section all resemble each other
    leaves = {option.rpartition(".")[2]: option for option in reversed(options)}
    found = namesake or near or leaves.get(nearest_name(leaf, leaves, cutoff=0.8) or "")
    if found and found.rpartition(".")[0] == dotted.rpartition(".")[0]:
        section = numbered.rpartition(".")[0]  # with the number of the same entry of a list
        return f"{section}.{found.rpartition('.')[2]}".lstrip(".")
    return found
