"""Imports that parts of titanlite do without, so that commands start fast. One process runs many statements."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.manifests import save

TORCH = {"torch"}
IMPORTS = [
    ("import titanlite, titanlite.tools.cli", {"torch", "numpy", "pydantic", "rich", "fsspec"}),
    ("import titanlite.data.tokenizer, titanlite.tools.ingest.bpe", {"torch", "tokenizers", "tiktoken"}),
    ("import titanlite.tools.ingest.encoding", {"torch", "pydantic"}),  # in every process that tokenizes
    ("import titanlite.schema", TORCH),
    ("import titanlite; titanlite.load_config('debug')", TORCH),
    ("from titanlite.techniques import every_technique; every_technique()", TORCH),
    ("import titanlite.tools.migrate.command", TORCH),
    ("import titanlite.checkpoint.manifest", TORCH),
    ("import titanlite.data.packing, titanlite.data.remote", TORCH),
    ("import titanlite.tools.report.page", TORCH),
    ("import titanlite.tools.ingest.inspect, titanlite.tools.ingest.prepare", TORCH),
    (  # what `generate` and preflight do
        "from titanlite.models.llama3 import Llama3; from titanlite.models.base import build_on_meta; "
        "build_on_meta(Llama3, Llama3.flavors['debug'])",
        {"torch._dynamo"},
    ),
]
COMMANDS = [
    # `train --help` reads the schema; the others need no more than the standard library.
    (
        "for words in words_of(cli.make_parser()):\n    assert words == ['train'] or cli.run([*words, '--help']) == 0",
        {"torch", "numpy", "pydantic", "rich", "fsspec"},
    ),
    ("assert cli.run(['--help']) == 0", {"torch", "numpy", "pydantic", "rich", "fsspec"}),
    ("assert cli.run(['train', '--help']) == 0", {"torch", "numpy"}),
    ("from titanlite.config.load import load; load('train_configs/debug.toml')", TORCH),
    ("from titanlite.schema import Config, dump; dump(Config())", TORCH),
    ("assert cli.run(['config', 'schema']) == 0", TORCH),
    ("assert cli.run(['config', 'show', '--diff', '--config', 'train_configs/debug.toml']) == 0", TORCH),
    ("assert cli.run(['config', 'migrate', '/no/such.toml']) == 2", TORCH),
    ("assert cli.run(['checkpoint', 'list', PLACE]) == 0", TORCH),
    ("assert cli.run(['checkpoint', 'verify', PLACE]) == 0", TORCH),
    ("assert cli.run(['checkpoint', 'prune', '--keep-latest-k', '1', PLACE]) == 0", TORCH),
]
BEGIN = """
import sys
from titanlite.tools import cli

def words_of(parser):
    for name, command in parser.commands.items():
        yield from ([name, *below] for below in words_of(command)) if command.commands else [[name]]
"""


@pytest.mark.long
@pytest.mark.parametrize("statements", [IMPORTS, COMMANDS], ids=["imports", "commands"])
def test_parts_import_nothing_heavy(statements: list[tuple[str, set[str]]], tmp_path: Path) -> None:
    """The process prints each statement after which a module is there that it should do without."""
    for step in (1, 2):
        save(str(tmp_path), step)
    lines = [BEGIN, f"PLACE = {str(tmp_path)!r}"]
    for statement, heavy in statements:
        lines += [statement, f"if found := {heavy!r} & sys.modules.keys(): print('HEAVY', found, {statement!r})"]
    code = "\n".join([*lines, "print('END')"])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if line.startswith(("HEAVY", "END"))] == ["END"], result.stdout


def test_imports_are_not_collected() -> None:
    program = """
import gc
from titanlite.runtime.allocator import importing
before = [generation["collections"] for generation in gc.get_stats()]
with importing():
    import email.parser, http.server, sqlite3, xml.dom.minidom
assert [generation["collections"] for generation in gc.get_stats()] == before
assert gc.isenabled() and gc.get_freeze_count()
gc.unfreeze()
with importing():
    import email.parser
assert not gc.get_freeze_count(), "what is imported already exempts nothing of the run"
"""
    subprocess.run([sys.executable, "-c", program], check=True)
