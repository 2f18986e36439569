"""`titanlite config migrate`: a TOML file of torchtitan -> one of titanlite, and a report of every key.

Each key of the old file is translated by its rule in `rules.RULES`. Then torchtitan's defaults for the other keys are,
and those that are not our defaults are written too, so that training stays the same. Keys without a counterpart on
which training depends stay as comments.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from titanlite.config.keys import dotted_keys, tables, toml_text
from titanlite.runtime.errors import RunError, UserError, nearest_name
from titanlite.runtime.files import read_small
from titanlite.tools.arguments import Count
from titanlite.tools.migrate.rules import (
    FLOAT8,
    OPTIMIZERS,
    RENAMED_IN_0_2,
    RULES,
    TOKENIZER_OF_0_1,
    OldConfig,
    translate,
)


class TrainingChanges(RunError):
    """The new config is written, but it does not train as the old one did."""


@dataclass
class Migration:
    """The settings of the new file, and the report about the old one."""

    settings: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    """Remarks on settings that the old file did not have, by key."""
    lost: list[str] = field(default_factory=list)
    """Settings, as text, on which training depends and that are in the new file only in part or not at all."""
    report: list[str] = field(default_factory=list)
    """Lines: one for each key, with what has become of it."""
    losses: list[str] = field(default_factory=list)
    """Keys because of which the new config does not train as the old one did."""

    def remark(self, kind: str, key: str, text: str = "") -> None:
        """Add a line to the report. The kinds LOST and UNKNOWN mean that training changes."""
        self.report.append(f"{kind:<12}{key}{text}")
        if kind in ("LOST", "UNKNOWN"):
            self.losses.append(key)

    def text(self) -> str:
        """Return the new file."""
        sections: dict[str, list[str]] = {}
        for key, value in self.settings.items():
            section, _, name = key.rpartition(".")
            comment = f"  # {self.comments[key]}" if key in self.comments else ""
            sections.setdefault(section, []).append(f"{name} = {toml_text(value)}{comment}")
        blocks = ["\n".join([f"[{section}]", *lines]) for section, lines in sections.items()]
        if self.lost:
            blocks.append("\n".join(["# Settings of torchtitan that are lost:", *(f"# {line}" for line in self.lost)]))
        return "\n\n".join(blocks) + "\n"


def migrate_config(
    old: Path,
    *,
    out: Path | None = None,
    world_size: Count | None = None,
) -> None:
    """Translate a TOML file of torchtitan.

    Prints the new config, or writes it with --out, and reports every key of the old one. Exit code 1 if the new config
    does not train as the old one did.

    Args:
        old (OLD.toml): config of torchtitan 0.1 or 0.2
        out (NEW.toml): file to write; it must not exist
        world_size: processes of the run; torchtitan's batch sizes depend on it

    Raises:
        UserError: `old` is no config of torchtitan, or `out` cannot be written.
        TrainingChanges: everything is written, and the new config does not train as the old one.

    Example:
        old.toml --out new.toml --world-size 64
    """
    try:
        text = read_small(old).decode().replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {old}: {error}") from None
    migration = migrate(text, old.name, world_size=world_size)
    new = migration.text()
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


def migrate(text: str, name: str, *, world_size: int | None = None) -> Migration:
    """Translate every key of a config of torchtitan.

    Args:
        text, name: the content of its file, and the name.
        world_size: processes of the run, which torchtitan's batch sizes depend on; None if it is not known.

    Raises:
        UserError: the text is not a config of torchtitan.
    """
    try:
        given = _flat(tomli.loads(text))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not valid TOML: {error}") from None
    migration = Migration()
    is_0_1 = any(key in RENAMED_IN_0_2 for key in given)
    if is_0_1:
        given = _renamed(given, migration)
    _check(given, name)
    old = OldConfig({key: value for key, value in given.items() if key in RULES}, world_size, is_0_1)
    if world_size and world_size % old.model_parallel_degree:
        degree = old.model_parallel_degree
        raise UserError(f"--world-size: {world_size} processes are not a multiple of the {degree} that share a batch")
    for key, value in given.items():
        _migrate_key(key, value, old, migration)
    _write_defaults(old, migration)
    return migration


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a table and of the tables in it, by dotted key."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _renamed(given: dict[str, Any], migration: Migration) -> dict[str, Any]:
    """Return the keys of torchtitan 0.1 by their names in 0.2."""
    for key in RENAMED_IN_0_2.keys() & given.keys():
        migration.remark("renamed", key, f" -> {RENAMED_IN_0_2[key]} in torchtitan 0.2")
    if given.pop("job.use_for_integration_test", None) is not None:
        migration.remark("dropped", "job.use_for_integration_test", ": is of its tests")
    given = {RENAMED_IN_0_2.get(key, key): value for key, value in given.items()}
    return {"model.tokenizer_path": TOKENIZER_OF_0_1, **given}


def _check(given: dict[str, Any], name: str) -> None:
    """Check that this is a config of torchtitan, and the types of its values.

    Raises:
        UserError: it is a config of titanlite or of another program, or lists all wrong types and unknown keys.
    """
    ours = set(dotted_keys())
    known = [key for key in given if key in RULES]
    if any(key in ours for key in given if key not in RULES) and all(key in ours for key in known):
        raise UserError(f"{name} is a config of titanlite already")
    if not known:
        raise UserError(f"{name} is not a config of torchtitan: it has none of their keys")
    wrong = {}
    for key in known:
        value_type, value = RULES[key].value_type, given[key]
        if value_type and not (type(value) is value_type or (value_type is float and type(value) is int)):
            wrong[key] = f"expected {value_type.__name__}, got {value!r}"
    if wrong:
        wrong |= {key: f"not a key of torchtitan{_hint(key)}" for key in given if key not in RULES}
        raise UserError("\n".join(f"{name}: {key}: {problem}" for key, problem in wrong.items()))


def _migrate_key(key: str, value: Any, old: OldConfig, migration: Migration) -> None:
    was = toml_text(value)
    if key not in RULES:
        if module := old["job.custom_config_module"] or old["experimental.custom_args_module"]:
            migration.remark("LOST", key, f" = {was}: belongs to your own config module {module}")
        else:
            migration.remark("UNKNOWN", key, f": not a key of torchtitan{_hint(key)}")
        migration.lost.append(f"{key} = {was}")
        return
    writes, note, lost = translate(key, value, old)
    for new, setting in writes.items():
        if migration.settings.setdefault(new, setting) != setting:
            note, lost = f"another key sets {new} = {toml_text(migration.settings[new])}", True
    settings = ", ".join(f"{new} = {toml_text(setting)}" for new, setting in writes.items())
    if lost:
        kind, text = "LOST", f" = {was} -> {settings}" if writes else f" = {was}"
        migration.lost.append(f"{key} = {was}")
    elif not writes:
        kind, text = "dropped", ""
    elif list(writes.values()) != [value]:
        kind, text = "translated", f" = {was} -> {settings}"
    else:
        kind, text = ("carried", "") if key in writes else ("renamed", f" -> {', '.join(writes)}")
    migration.remark(kind, key, text + (f": {note}" if note else ""))


def _hint(key: str) -> str:
    """Return the end of an error message: the key of torchtitan that was probably meant, if there is one."""
    leaves = {name.rpartition(".")[2]: name for name in RULES}
    near = nearest_name(key, RULES, cutoff=0.8)
    near = near or leaves.get(nearest_name(key.rpartition(".")[2], leaves, cutoff=0.9) or "")
    return f", did you mean {near}?" if near else ""


def _write_defaults(old: OldConfig, migration: Migration) -> None:
    """Set what the old file leaves to torchtitan's defaults, where ours differ."""
    ours = {option.key: option.node.get("default") for table in tables() for option in table.options}
    for key, rule in RULES.items():
        section = key.rpartition(".")[0]
        unused = (section == FLOAT8 and not old.float8) or (section == "validation" and not old["validation.enable"])
        if key in old.given or unused:
            continue
        outcome = translate(key, rule.default, old)
        note = outcome.note
        for new, value in outcome.writes.items():
            default = ours.get(new)
            if new not in migration.settings and (value != default or note):
                about, note = f": {note}" if note else "", ""
                migration.settings[new], migration.comments[new] = value, f"torchtitan's default{about}"
                here = "" if default in (None, value) else f" (here: {toml_text(default)})"
                migration.remark("default", new, f" = {toml_text(value)} there{here}{about}")
        if outcome.lost:
            migration.lost.append(f"{key} = {toml_text(rule.default)} (default)")
            migration.remark("LOST", key, f" = {toml_text(rule.default)} (default): {outcome.note}")
    migration.settings["data.shuffle"] = False
    migration.comments["data.shuffle"] = "torchtitan reads in order"
    migration.remark("default", "data.shuffle", " = false: torchtitan reads documents in the order of their files")
    decay = old["optimizer.weight_decay"]
    if decay > 0 and old["optimizer.name"] in OPTIMIZERS:
        migration.settings["optimizer.groups"] = [{"match": ["*"], "weight_decay": decay}]
        about = "torchtitan decays vectors (norms, biases) too, and optimizer.weight_decay does not"
        migration.comments["optimizer.groups"] = about
        migration.remark(
            "default", "optimizer.groups", f": weight_decay = {toml_text(decay)} for all parameters: {about}"
        )
    if "debug.seed" not in migration.settings:
        migration.remark("note", "debug.seed: torchtitan drew a new seed for each run; it is always 0 here unless set")
