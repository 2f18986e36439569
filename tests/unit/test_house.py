"""Rules of the house that a reader would otherwise have to take on trust."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(Path("titanlite").rglob("*.py"))


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('MODULES', *sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.rpartition("MODULES")[2].split())


@pytest.mark.parametrize(
    "statement",
    [
        "import titanlite",
        "import titanlite.cli",
        "import titanlite.config.schema",
        "from titanlite.config.load import load, dump; dump(load('train_configs/debug.toml'))",
        "from titanlite.cli import run; run(['--help'])",
        "from titanlite.cli import run; run(['train', '--help'])",
        "from titanlite.cli import run; run(['config', 'schema'])",
        "from titanlite.cli import run; run(['config', 'show', '--diff', '--config', 'train_configs/debug.toml'])",
        "from titanlite.cli import run; run(['config', 'migrate', '/no/such.toml'])",
        "import titanlite.migrate.command",
        "import titanlite.checkpoint.manifest",
    ],
)
def test_no_torch_is_imported(statement: str) -> None:
    assert "torch" not in modules_after(statement)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_module_level_state(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for name in [target.id for target in targets if isinstance(target, ast.Name)]:
            is_constant = name.isupper() or name.startswith("__")
            is_type_alias = name[0].isupper()
            assert is_constant or is_type_alias or name in ("logger", "aten"), f"{path}: {name}"


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found


@pytest.mark.parametrize("path", sorted(Path("titanlite/models").glob("*.py")), ids=str)
def test_models_know_nothing_of_ranks_and_meshes(path: Path) -> None:
    roots = ("torch.distributed", "titanlite.parallelize", "titanlite.train", "titanlite.data")
    forbidden = (*roots, "titanlite.runtime.process_group", "titanlite.runtime.ranks")
    assert not [name for name in imports(path) if name.startswith(forbidden)]


def test_only_orchestrators_take_the_whole_config() -> None:
    """A stage is given its own section."""
    config = {"config/load.py", "config/checks.py", "config/describe.py"}
    plans = {
        f"plan/{name}.py"
        for name in ("trace", "estimate", "search", "budget", "suggestions", "out_of_memory", "command")
    }
    whole = {*config, *plans, "cli.py", "preflight.py", "train.py"}
    whole |= {"runtime/run_folder.py", "metrics/run_summary.py", "checkpoint/fingerprint.py"}
    takers = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name) and node.annotation.id == "Config":
                takers.add(str(path.relative_to("titanlite")))
    assert takers <= whole


@pytest.mark.parametrize("path", ["titanlite/train.py", "titanlite/parallelize/__init__.py"])
def test_orchestrators_fit_on_a_screen(path: str) -> None:
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 70, node.name
