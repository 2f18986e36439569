"""Names of all options, from the schema, and the nearest name to one that does not exist."""

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from titanlite.config.schema import Config
from titanlite.runtime.errors import nearest_name


def dotted_keys(model: type[BaseModel] = Config, prefix: str = "", *, inside_lists: bool = False) -> Iterator[str]:
    """Yield every option as section.key.

    Args:
        inside_lists: include the keys of the tables in a list of tables, without the number of the table.
    """
    for name, field in model.model_fields.items():
        sections = [kind for kind in _branches(field.annotation) if is_section(kind)]
        for section in sections:
            yield from dotted_keys(section, f"{prefix}{name}.", inside_lists=inside_lists)
        if not sections:
            yield prefix + name
            for element in _elements(field.annotation) if inside_lists else ():
                yield from dotted_keys(element, f"{prefix}{name}.", inside_lists=True)


def is_section(annotation: Any) -> bool:
    """Return True for the type of a table of the TOML file that has fields."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def expects_list(key: tuple[str, ...]) -> bool:
    """Return True if the schema allows a list at the key. A number in a key names an entry of a list."""
    kinds: list[Any] = [Config]
    for part in key:
        inner: list[Any] = []
        for kind in kinds:
            if is_section(kind):
                inner += [field.annotation for name, field in kind.model_fields.items() if name == part]
            elif get_origin(kind) is list and part.isdecimal():
                inner += get_args(kind)
            elif get_origin(kind) is dict:
                inner.append(get_args(kind)[1])
        kinds = [branch for kind in inner for branch in _branches(kind)]
    return any(get_origin(kind) is list for kind in kinds)


def nearest_key(dotted: str) -> str | None:
    """Return the option or section probably intended: the same name in another section, else the closest spelling."""
    numbered, dotted = dotted, ".".join(part for part in dotted.split(".") if not part.isdecimal())
    options = list(dotted_keys(inside_lists=True))
    parents = (option.split(".")[:end] for option in options for end in range(1, option.count(".") + 1))
    sections = sorted({".".join(parts) for parts in parents})
    leaf = dotted.rpartition(".")[2]
    same_leaf = [name for name in options if name.rpartition(".")[2] == leaf]
    inside = [name for name in same_leaf if name.endswith(f".{dotted}")]  # float8.enable
    namesake = inside[0] if inside else nearest_name(dotted, same_leaf, cutoff=0.6 if len(same_leaf) > 1 else 0)
    of_same_depth = [name for name in options + sections if name.count(".") == dotted.count(".")]
    near = nearest_name(dotted, [name for name in of_same_depth if _is_like(leaf, name)], cutoff=0.8)
    leaves = {option.rpartition(".")[2]: option for option in reversed(options)}
    found = namesake or near or leaves.get(nearest_name(leaf, leaves, cutoff=0.8) or "")
    if found and found.rpartition(".")[0] == dotted.rpartition(".")[0]:
        return f"{numbered.rpartition('.')[0]}.{found.rpartition('.')[2]}".lstrip(".")  # of the same entry of a list
    return found


def _is_like(leaf: str, name: str) -> bool:
    """Return True if the leaf resembles the last part of a name. Whole keys of one section all resemble each other."""
    return nearest_name(leaf, [name.rpartition(".")[2]]) is not None


def _branches(kind: Any) -> Iterator[Any]:
    """Yield the types of a union, or the type itself if it is no union."""
    if get_origin(kind) in (Union, UnionType):
        for branch in get_args(kind):
            yield from _branches(branch)
    elif get_origin(kind) is Annotated:
        yield from _branches(get_args(kind)[0])
    else:
        yield kind


def _elements(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that are entries of a list, or of a table with the user's own names."""
    for kind in _branches(annotation):
        inner = get_args(kind)[-1:] if get_origin(kind) in (list, dict) else ()
        yield from (entry for branch in inner for entry in _branches(branch) if is_section(entry))
