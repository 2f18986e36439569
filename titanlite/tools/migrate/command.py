"""`titanlite config migrate`: a TOML file of torchtitan -> one of titanlite, and a report of every key.

One pass over the old file: each key goes through its rule in `rules.RULES`, and its line, with its comments, goes
to its new section. Then the same rules are asked about torchtitan's defaults: those that are not ours are written too,
so that training stays the same. What has no counterpart stays as a comment if it is missed, or if it had a comment.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import tomlkit
from tomlkit.exceptions import TOMLKitError

from titanlite.config.keys import dotted_keys, tables, toml_text
from titanlite.config.load import read
from titanlite.config.source import key_lines
from titanlite.data.tokenizer import find_tokenizer
from titanlite.runtime.errors import ConfigError, Place, Problem, RunError, UserError, nearest_name
from titanlite.tools.arguments import Count
from titanlite.tools.migrate.document import Line, read_lines
from titanlite.tools.migrate.rules import FLOAT8, ONLY_IN, OPTIMIZERS, RULES, Old, convert

SECTIONS = {"float8": FLOAT8[1]}
"""Sections for the comments of sections that have another name here."""


class TrainingChanges(RunError):
    """The new config is there, but not all of what training depends on."""


@dataclass
class Migration:
    """The new file as it grows, and the remarks about it."""

    sections: dict[str, list[str]] = field(default_factory=dict)
    headers: dict[str, Line] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    report: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    def remark(self, kind: str, key: str, text: str = "") -> None:
        self.report.append(f"{kind:<12}{key}{text}")
        if kind in ("LOST", "UNKNOWN"):
            self.losses.append(key)

    def put(self, key: str, value: Any, line: Line) -> None:
        """A setting, with the comments of a line; as it was written, if it is the same."""
        section, _, name = key.rpartition(".")
        text = line.text if value == line.value and line.text else tomlkit.item(value).as_string()
        setting = f"{name} = {text}  {line.beside}".rstrip()
        lines = self.sections.setdefault(section, [])
        if not line.key and len(lines) > 1 and not lines[-1] and not lines[-2].startswith("#"):
            lines.pop()  # what is added stands with the others
        lines += [*line.above, setting]
        self.settings[key] = value

    def keep_as_comment(self, line: Line) -> None:
        name = line.key.removeprefix(f"{line.section}.")
        text = f"{name} = {line.text}  {line.beside}".rstrip()
        lines = self.sections.setdefault(SECTIONS.get(line.section, line.section), [])
        lines += [*line.above, *(part if part[:1] in ("", "#") else f"# {part}" for part in text.splitlines())]

    def text(self) -> str:
        blocks = []
        for section in sorted(self.sections, key=lambda section: section != ""):  # what stands above all headers first
            lines, header = self.sections[section], self.headers.get(section, Line(section, []))
            has_settings = any(line and not line.startswith("#") for line in lines)
            if section and (has_settings or header.above or header.beside or any(lines)):
                title = f"[{section}]  {header.beside}".rstrip()
                lines = [*header.above, title if has_settings else f"# {title}", *lines]
            blocks.append("\n".join(line for n, line in enumerate(lines) if line or (n and lines[n - 1])).strip("\n"))
        return "\n\n".join(filter(None, blocks)) + "\n"


def migrate_config(
    old: Path,
    *,
    out: Path | None = None,
    world_size: Count | None = None,
    from_: Literal["0.1", "0.2"] | None = None,
) -> None:
    """Translate a TOML file of torchtitan.

    Prints the new config, or writes it with --out, and reports every key of the old one. Exit code 1 if the new config
    does not train as the old one did.

    Args:
        old (OLD.toml): config of torchtitan 0.1 or 0.2
        out (NEW.toml): file to write; it must not exist
        world_size: processes of the run; torchtitan's batch sizes depend on it
        from_: version of torchtitan; default: by keys

    Raises:
        UserError: `old` is no config of torchtitan, or `out` cannot be written.
        TrainingChanges: everything is written, and the new config does not train as the old one.

    Example:
        old.toml --out new.toml --world-size 64
    """
    try:
        text = old.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {old}: {error}") from None
    migration = migrate(text, old.name, version=from_, world_size=world_size)
    new = migration.text()
    for problem in _problems(new, out.name if out else "new.toml", world_size):
        migration.remark("to mend", problem)
    if out:
        try:
            with out.open("x", encoding="utf-8") as file:
                file.write(new)
        except FileExistsError:
            raise UserError(f"--out: {out} exists; name a new file") from None
        except OSError as error:
            raise UserError(f"cannot write {out}: {error}") from None
    else:
        print(new, end="", flush=True)
    print("\n".join(migration.report), file=sys.stdout if out else sys.stderr)
    if migration.losses:
        raise TrainingChanges(f"the new config does not train as the old one did: {', '.join(migration.losses)}")


def migrate(text: str, name: str, *, version: str | None = None, world_size: int | None = None) -> Migration:
    """Migrate every key.

    Args:
        text, name: a config of torchtitan, and the name of its file.
        version: 0.1 or 0.2; None to find it by its keys.
        world_size: processes of the run, which torchtitan's batch sizes depend on; None if it is not known.

    Raises:
        UserError: it is none.
    """
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise UserError(f"{name} is not valid TOML: {error}") from None
    pending: list[str] = []
    lines = list(read_lines(document, "", "", pending))
    lines.append(Line(lines[-1].section if lines else "", pending))
    given = {line.key: line.value for line in lines if line.key}
    _check(given, text, name)
    migration = Migration()
    if version is None:
        version = _version(list(given))
        migration.remark("note", f"read as a config of torchtitan {version} (--from 0.1 or 0.2 decides)")
    old = Old({key: value for key, value in given.items() if key in RULES}, version, world_size)
    if world_size and world_size % old.model_parallel_degree:
        degree = old.model_parallel_degree
        raise UserError(f"--world-size: {world_size} processes are not a multiple of the {degree} that share a batch")
    for line in lines:
        if line.key:
            _migrate_key(line, old, migration)
        elif line.is_header:
            section = SECTIONS.get(line.section, line.section)
            migration.sections.setdefault(section, [])
            migration.headers.setdefault(section, line)
        else:
            migration.sections.setdefault(SECTIONS.get(line.section, line.section), []).extend(line.above)
    _write_defaults(old, migration)
    return migration


def _check(given: dict[str, Any], text: str, name: str) -> None:
    """Raises UserError: it is titanlite's, or neither's, or values have the wrong type. The last names all that is
    wrong, unknown keys too."""
    ours = set(dotted_keys())
    known = [key for key in given if key in RULES]
    if any(key in ours for key in given if key not in RULES) and all(key in ours for key in known):
        raise UserError(f"{name} is a config of titanlite already")
    if not known:
        raise UserError(f"{name} is not a config of torchtitan 0.1 or 0.2: it has none of their keys")
    wrong = {}
    for key in known:
        value_type, value = RULES[key].value_type, given[key]
        if value_type and not (type(value) is value_type or (value_type is float and type(value) is int)):
            wrong[key] = f"expected {value_type.__name__}, got {value!r}"
    if wrong:
        wrong |= {key: f"not a key of torchtitan{_hint(key)}" for key in given if key not in RULES}
        lines = {".".join(key): line for key, line in key_lines(text).items()}
        places = {key: Place(0, line, f"{name}:{line}") for key, line in lines.items()}
        raise ConfigError([Problem(key, wrong[key], places.get(key)) for key in given if key in wrong])


def _version(keys: list[str]) -> str:
    """Return the version that has more keys which the other lacks; 0.2 if both have none."""

    def count(version: str) -> int:
        names = ONLY_IN[version].split()
        return sum(key == name or (name.endswith(".") and key.startswith(name)) for key in keys for name in names)

    return "0.1" if count("0.1") > count("0.2") else "0.2"


def _migrate_key(line: Line, old: Old, migration: Migration) -> None:
    if line.key not in RULES:
        if module := old["job.custom_config_module"] or old["experimental.custom_args_module"]:
            migration.remark(
                "LOST", line.key, f" = {toml_text(line.value)}: belongs to your own config module {module}"
            )
        else:
            migration.remark("UNKNOWN", line.key, f": not a key of torchtitan{_hint(line.key)}")
        migration.keep_as_comment(line)
        return
    writes, note, lost = convert(line.key, line.value, old)
    for key, value in writes.items():
        if migration.settings.get(key, value) != value:
            note, lost = f"another key sets {key} = {toml_text(migration.settings[key])}", True
    fresh = {key: value for key, value in writes.items() if key not in migration.settings}
    if not fresh and (lost or line.above or line.beside):
        migration.keep_as_comment(line)
    rest = line
    for key, value in fresh.items():
        migration.put(key, value, rest)
        rest = Line(line.section, [])
    was, settings = toml_text(line.value), ", ".join(f"{key} = {toml_text(value)}" for key, value in writes.items())
    if lost:
        kind, text = "LOST", f" = {was} -> {settings}" if writes else f" = {was}"
    elif not writes:
        kind, text = "dropped", ""
    elif list(writes.values()) != [line.value]:
        kind, text = "translated", f" = {was} -> {settings}"
    else:
        kind, text = ("carried", "") if line.key in writes else ("renamed", f" -> {', '.join(writes)}")
    migration.remark(kind, line.key, text + (f": {note}" if note else ""))


def _hint(key: str) -> str:
    leaves = {name.rpartition(".")[2]: name for name in RULES}
    near = nearest_name(key, RULES, cutoff=0.8)
    near = near or leaves.get(nearest_name(key.rpartition(".")[2], leaves, cutoff=0.8) or "")
    return f", did you mean {near}?" if near else ""


def _write_defaults(old: Old, migration: Migration) -> None:
    """Set what the old file leaves to torchtitan's defaults, where ours differ."""
    ours = {option.key: option.node.get("default") for table in tables() for option in table.options}
    for key, rule in RULES.items():
        section = key.rpartition(".")[0]
        unused = (section in FLOAT8 and not old.float8) or (section == "validation" and not old["validation.enable"])
        if key in old.given or unused:
            continue
        outcome = convert(key, rule.default, old)
        note = outcome.note
        for new, value in outcome.writes.items():
            default = ours.get(new)
            if new not in migration.settings and (value != default or note):
                about, note = f": {note}" if note else "", ""
                migration.put(new, value, Line(section, [], f"# torchtitan's default{about}"))
                here = "" if default in (None, value) else f" (here: {toml_text(default)})"
                migration.remark("default", new, f" = {toml_text(value)} there{here}{about}")
        if outcome.lost:
            migration.keep_as_comment(Line(section, [], "# torchtitan's default", key, text=toml_text(rule.default)))
            migration.remark("LOST", key, f" = {toml_text(rule.default)} (default): {outcome.note}")
    migration.put("data.shuffle", False, Line("data", [], "# torchtitan reads in order"))
    migration.remark("default", "data.shuffle", " = false: torchtitan reads documents in the order of their files")
    _decay_vectors(old, migration)
    if "debug.seed" not in migration.settings:
        migration.remark("note", "debug.seed: torchtitan drew a new seed for each run; it is always 0 here unless set")


def _decay_vectors(old: Old, migration: Migration) -> None:
    """torchtitan's weight decay is of all parameters, and ours of vectors too only where a group has its own."""
    decay = old["optimizer.weight_decay"]
    if decay <= 0 or old["optimizer.name"] not in OPTIMIZERS:
        return
    migration.sections["optimizer"] += [
        "",
        "# torchtitan decays vectors (norms, biases) too, and optimizer.weight_decay does not: this group is of all",
        "[[optimizer.groups]]",
        'match = ["*"]',
        f"weight_decay = {toml_text(decay)}",
    ]
    migration.settings["optimizer.groups"] = [{"match": ["*"], "weight_decay": decay}]
    about = "(here: only those with two or more dimensions, unless a group has its own)"
    migration.remark(
        "default", "optimizer.groups", f": weight_decay = {toml_text(decay)} for all parameters there {about}"
    )


def _problems(text: str, name: str, world_size: int | None) -> list[str]:
    """Return the problems that `titanlite check` reports first: the part that needs no PyTorch."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        draft = read(path, world_size=world_size)
    found = [str(problem) for problem in draft.problems]
    try:
        find_tokenizer(draft.config.data.tokenizer)
    except UserError as error:
        found.append(f"data.tokenizer: {error}")
    return found
