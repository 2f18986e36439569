"""Print what a reader must hold: lines of code that a plain run imports, by room, and rooms that import each other.

    python scripts/reach.py [--against COMMIT]

Lines of code are those without docstrings, comments and blanks. A plain run imports no technique: those are imported in
functions, where the config asks for them. A room is a folder of titanlite/, or a file beside them. One step has the
files that docs/architecture.md names in its walk. `--against` prints the difference to a commit. This refuses nothing;
CI prints it for each change.
"""

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
)  # fmt: skip


class House(NamedTuple):
    lines: dict[str, int]
    """Lines of code of each module."""
    imports: dict[str, set[str]]
    """Modules of titanlite that each module imports, also inside functions, but not for types alone."""
    at_import: dict[str, set[str]]
    """Those outside of functions."""
    rooms: dict[str, str]
    """Room of each module."""


def code_lines(text: str) -> int:
    """Return the number of lines without docstrings, comments and blanks."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for child in node.body if isinstance(node, DOCUMENTED) else ():
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings.update(range(child.lineno, (child.end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def imported_names(node: ast.AST, *, in_functions: bool = True) -> Iterator[str]:
    """Yield the dotted names that a tree imports; those under `if TYPE_CHECKING` aside."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)) and (
            in_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        ):
            yield from imported_names(child, in_functions=in_functions)


def read_house(root: Path) -> House:
    """Read the modules of a checkout."""
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (root / "titanlite").rglob("*.py")
    }
    lines, imports, at_import, rooms = {}, {}, {}, {}
    for module, path in files.items():
        text = path.read_text()
        lines[module] = code_lines(text)
        tree = ast.parse(text)
        imports[module] = {known(name, files) for name in imported_names(tree)} - {""}
        at_import[module] = {known(name, files) for name in imported_names(tree, in_functions=False)} - {""}
        inner = path.relative_to(root / "titanlite")
        rooms[module] = f"{inner.parts[0]}/" if len(inner.parts) > 1 else inner.name
    return House(lines, imports, at_import, rooms)


def known(name: str, modules: Mapping[str, object]) -> str:
    """Return the module that a dotted name is, or is in; "" for one outside titanlite."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def reached(imports: Mapping[str, set[str]], start: str) -> set[str]:
    """Return a module with all that it imports, directly or through others, and their packages."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module and module not in found:
            found.add(module)
            waiting += [*imports[module], known(module.rpartition(".")[0], imports)]
    return found


def circles(house: House) -> list[list[str]]:
    """Return the groups of rooms that import each other, directly or through others."""
    ways: dict[str, set[str]] = {room: set() for room in house.rooms.values()}
    for module, others in house.imports.items():
        ways[house.rooms[module]] |= {house.rooms[other] for other in others} - {house.rooms[module]}
    for middle in ways:
        for others in ways.values():
            if middle in others:
                others |= ways[middle]
    groups = {tuple(sorted(other for other in ways if other in ways[room] and room in ways[other])) for room in ways}
    return [list(group) for group in sorted(groups) if group]


def walk(root: Path) -> set[str]:
    """Return the modules that docs/architecture.md names for one step, as `file: name`."""
    page = root / "docs/architecture.md"
    _, _, rest = page.read_text().partition("## One step, by name\n") if page.exists() else ("", "", "")
    files = re.findall(r"`([\w/]+)\.py: ", rest.partition("\n## ")[0])
    return {f"titanlite.{file.removesuffix('/__init__').replace('/', '.')}" for file in files}


def measure(root: Path) -> dict[str, int]:
    """Return lines and files of a checkout: of a plain run, by room, and of all."""
    house = read_house(root)
    plain, whole = (reached(imports, "titanlite.train") for imports in (house.at_import, house.imports))
    for module in house.imports:  # imported by name, where a config asks for it
        whole |= reached(house.imports, module) if module.startswith("titanlite.techniques.") else set()
    step = walk(root) & house.lines.keys()
    by_room = Counter[str]()
    for module in plain:
        by_room[f"  {house.rooms[module]}"] += house.lines[module]
    return {
        "a plain run: lines": sum(house.lines[module] for module in plain),
        "a plain run: files": len(plain),
        **dict(sorted(by_room.items())),
        "one step, by name: lines": sum(house.lines[module] for module in step),
        "one step, by name: files": len(step),
        "with every technique: lines": sum(house.lines[module] for module in whole),
        "with every technique: files": len(whole),
        "all: lines": sum(house.lines.values()),
        "all: files": len(house.lines),
        "rooms that import each other": sum(map(len, circles(house))),
    }


def measure_commit(root: Path, commit: str) -> dict[str, int]:
    """Measure the package as it is in a commit."""
    packed = subprocess.run(
        ["git", "archive", commit, "titanlite", "docs"], cwd=root, capture_output=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        return measure(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="print the difference to a commit")
    commit = parser.parse_args().against
    root = Path(__file__).parents[1]
    now = measure(root)
    before = measure_commit(root, commit) if commit else {}
    for name in [*now, *(before.keys() - now.keys())]:
        change = now.get(name, 0) - before.get(name, 0) if commit else 0
        print(f"{name:32}{now.get(name, 0):8,}" + (f"{change:+8,}" if change else ""))
    for group in circles(read_house(root)):
        print("import each other:", ", ".join(group))


if __name__ == "__main__":
    main()
