"""Keys of a TOML file in its order, each with its comments."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tomlkit.container import Container
from tomlkit.items import AoT, Comment, InlineTable, Null, Table, Whitespace

from titanlite.config.keys import toml_text


@dataclass
class Line:
    """A key of the old file. Without a key: a header, or comments that stand alone."""

    section: str
    above: list[str]
    """Comments, each on its line."""
    beside: str = ""
    """A comment on the same line."""
    key: str = ""
    value: Any = None
    text: str = ""
    """The value as it was written."""
    is_header: bool = False


def read_lines(container: Container, section: str, prefix: str, pending: list[str]) -> Iterator[Line]:
    """The keys of a table and of the tables in it.

    Args:
        section: whose header they stand below.
        prefix: of their dotted keys.
        pending: comments that belong to what comes next, if no empty line comes first.
    """
    for part, item in container.body:
        if isinstance(item, Comment):
            pending.append(item.trivia.comment)
        elif isinstance(item, Whitespace):
            if "\n" in item.s:
                yield Line(section, [*pending, ""])
                pending.clear()
        elif part is not None and not isinstance(item, Null):
            key, trivia = prefix + part.key, item.trivia
            if isinstance(item, Table | InlineTable):
                is_header = isinstance(item, Table) and not part.is_dotted() and not item.is_super_table()
                if is_header:
                    yield Line(key, pending[:], trivia.comment, is_header=True)
                    pending.clear()
                elif trivia.comment and isinstance(item, InlineTable):  # another table's is that of the first in it
                    pending.append(trivia.comment)
                yield from read_lines(item.value, key if is_header else section, f"{key}.", pending)
            else:
                text = toml_text(item.unwrap()) if isinstance(item, AoT) else item.as_string()
                yield Line(section, pending[:], trivia.comment, key, item.unwrap(), text)
                pending.clear()
