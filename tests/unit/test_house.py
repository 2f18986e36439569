"""Rules of the house, kept by tests: what imports what, what is replaced, and what is private."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path("titanlite")
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}


def short(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


def without_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, but for blocks under `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            yield from without_type_checking(child)


def imports(tree: ast.Module) -> set[str]:
    """Names that a file imports, also inside functions: modules, and what it takes from them."""
    found: set[str] = set()
    for node in without_type_checking(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def imported_modules(path: Path) -> set[str]:
    """Modules of titanlite that a file imports, also inside functions."""
    names = imports(TREES[path])
    return {name for name in (*names, *(name.rpartition(".")[0] for name in names)) if name in MODULES} - (
        # `from titanlite.data import loader` takes the module loader, and nothing of the package's own file.
        {name.rpartition(".")[0] for name in names if name in MODULES}
    )


IMPORTS = {name: imported_modules(path) for name, path in MODULES.items()}

# Rooms: folders of titanlite/, and the files beside them


def test_training_imports_no_tool() -> None:
    """Walk the imports from train.py; each way into titanlite/tools/ is shown as a chain."""
    # Techniques are imported by name, where a config asks for them.
    chains = {name: [name] for name in ("titanlite.train", *(it for it in IMPORTS if ".techniques." in it))}
    waiting = [*chains]
    while waiting:
        name = waiting.pop()
        for other in sorted(IMPORTS[name] - chains.keys()):
            chains[other] = [*chains[name], other]
            waiting.append(other)
    assert len(chains) > 50, "the walk reaches what trains"
    assert [" > ".join(chain) for name, chain in chains.items() if name.startswith("titanlite.tools")] == []


def room_of(name: str) -> str:
    """Room of a module: a folder, or a file beside the folders."""
    parts = MODULES[name].relative_to(PACKAGE).parts
    return f"{parts[0]}/" if parts[1:] else parts[0]


def circles(imports: dict[str, set[str]]) -> set[str]:
    """Return what imports something that imports it, directly or through others."""
    reached = {name: set(others) for name, others in imports.items()}
    for middle in reached:
        for others in reached.values():
            if middle in others:
                others |= reached.get(middle, set())
    return {name for name, others in reached.items() if name in others}


def test_no_circles_of_imports() -> None:
    """A room, and within it a module, that imports another is never imported by it; blocks for types aside."""
    assert circles(IMPORTS) == set()
    rooms: dict[str, set[str]] = {}
    for name, others in IMPORTS.items():
        rooms.setdefault(room_of(name), set()).update({room_of(other) for other in others} - {room_of(name)})
    assert len(rooms) > 15
    assert circles(rooms) == set()


def test_what_a_circle_is() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == {"a", "b", "c"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "models").glob("*.py")), ids=short)
def test_models_know_nothing_of_ranks_and_meshes(path: Path) -> None:
    roots = ("torch.distributed", "titanlite.parallelize", "titanlite.techniques", "titanlite.mesh", "titanlite.data")
    forbidden = (*roots, "titanlite.train", "titanlite.runtime.process_group", "titanlite.runtime.ranks")
    assert not [name for name in imports(TREES[path]) if name.startswith(forbidden)]


@pytest.mark.long
def test_only_orchestrators_take_the_whole_config() -> None:
    """A stage is given its own section."""
    whole = {"train.py", "checks/preflight.py", "checks/memory.py", "run/run_folder.py"}
    whole |= {"metrics/run_summary.py", "checkpoint/load.py", "parallelize/__init__.py", "techniques/technique.py"}
    # Which options a technique reads is its own affair: the contract gives it all of them.
    whole |= {short(path) for path in FILES if "TECHNIQUE = " in path.read_text()} | {"techniques/__init__.py"}
    takers = set()
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name) and node.annotation.id == "Config":
                takers.add(short(path))
    assert {taker for taker in takers if not taker.startswith(("config/", "tools/"))} <= whole


# State, patches, and what is private


@pytest.mark.parametrize("path", FILES, ids=short)
def test_no_module_level_state(path: Path) -> None:
    tree = TREES[path]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for name in [target.id for target in targets if isinstance(target, ast.Name)]:
            is_constant = name.isupper() or name.startswith("__")
            is_type_alias = name[0].isupper()
            assert is_constant or is_type_alias or name in ("logger", "aten"), f"{path}: {name}"


def root_of(node: ast.expr) -> str:
    """Return the first name of a dotted expression: torch of torch.nn.Module."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def patches(tree: ast.Module) -> Iterator[str]:
    """Yield what replaces parts of other modules, or reads another function's variables."""
    imported = {alias.asname or alias.name.split(".")[0] for node in ast.walk(tree)
                if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (name for name in imports(ast.Module([node], [])) if name.startswith("unittest"))
        elif isinstance(node, ast.Attribute) and node.attr in ("f_locals", "_getframe", "tb_frame"):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            yield ast.unparse(node)
        elif isinstance(node, ast.Assign):
            changed = [name for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Attribute)
                       and isinstance(name.ctx, ast.Store)]  # fmt: skip
            for target in changed:
                if target.attr in ("__class__", "forward") or root_of(target) in imported:
                    yield ast.unparse(target)


REPLACED = {
    "parallelize/materialize.py": {
        "setattr(model.get_submodule(module), attribute, model.get_parameter(first))": (
            "parameters that two modules share are one again after materializing"
        ),
    },
    "runtime/process_group.py": {
        "torch.backends.cudnn.benchmark": "a setting that PyTorch documents as an attribute",
        "torch.utils.deterministic.fill_uninitialized_memory": "a setting that PyTorch documents as an attribute",
    },
    "runtime/output.py": {
        "sys.stdout": "Python documents these two as the way to redirect output; what goes there is also logged",
        "sys.stderr": "as sys.stdout",
        "sys.stdin": "as sys.stdout; a stream that the shell closed is opened on /dev/null",
    },
    "run/raw_output.py": {
        "sys.stdout": "as in runtime/output.py; what is written is also logged",
        "sys.stderr": "as sys.stdout",
    },
    "parallelize/activation_checkpoint.py": {
        "block.forward": "a wrapper module would stand in the names of parameters and in the checkpoint",
    },
    "parallelize/compile.py": {
        "block.forward": "Module.compile() compiles the hooks of FSDP too; only the forward is compiled here",
    },
    "runtime/private_torch/fsdp.py": {
        "parameter.__class__": "on one rank a parameter is gathered in place; quantized ones keep their types",
        "unit.__class__": "the plan records the collectives and the memory of each FSDP unit; no run does",
    },
    "runtime/private_torch/tracing.py": {
        "propagator.__class__": "the planner must not count tensors that metadata propagation makes",
    },
}
"""What titanlite replaces in other objects, by file, each with its reason."""


def test_what_is_replaced_is_listed_with_its_reason() -> None:
    """No mocks, no frames that are read, and no class, forward or attribute replaced but what is listed."""
    found = {short(path): set(patches(tree)) for path, tree in TREES.items()}
    assert {path: names for path, names in found.items() if names} == {
        path: names.keys() for path, names in REPLACED.items()
    }


DOCUMENTED = {"os._exit", "sys._current_frames", "_replace", "_asdict", "_fields", "_fields_"}
"""Names with an underscore that Python documents."""


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_uses(tree: ast.Module) -> Iterator[str]:
    """Yield names with a leading underscore that another package has, as imports and as attributes."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else targets
        own |= {name.attr for target in targets for name in ast.walk(target) if isinstance(name, ast.Attribute)
                if root_of(name) == "self"}  # fmt: skip
        own |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    for name in imports(tree):
        if is_private(name):
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            name = ast.unparse(node)
            if name not in DOCUMENTED and node.attr not in DOCUMENTED:
                yield name


def test_what_the_rules_find() -> None:
    source = """
from unittest import mock
import torch
from torch.optim import _muon
from torch.distributed import fsdp
class A:
    def __init__(self): self._mine = {}
    def f(self, other, frame):
        fsdp.fully_shard = self._mine
        other.__class__, other.forward = A, frame
        setattr(other, "f", frame.f_locals)
        return other._mine, other._theirs, torch._C.g, other._replace(), os._exit(0)
"""
    tree = ast.parse(source)
    found = {"unittest.mock", "fsdp.fully_shard", "setattr(other, 'f', frame.f_locals)", "f_locals"}
    found |= {"other.__class__", "other.forward"}
    assert set(patches(tree)) == found
    assert set(private_uses(tree)) == {"torch.optim._muon", "other._theirs", "torch._C"}


@pytest.mark.long
def test_private_names_of_pytorch_are_in_one_room() -> None:
    room = PACKAGE / "runtime" / "private_torch"
    found = {short(path): sorted(set(private_uses(tree))) for path, tree in TREES.items() if path.parent != room}
    assert {path: names for path, names in found.items() if names} == {}


def test_each_private_use_has_a_test() -> None:
    room = PACKAGE / "runtime" / "private_torch"
    offered = {
        node.name
        for path, tree in TREES.items()
        for node in tree.body
        if path.parent == room and isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    tests = ast.parse(Path("tests/unit/test_private_torch.py").read_text())
    called = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name)}
    assert len(offered) > 30
    assert offered - called == set()


def test_only_tools_import_what_tracing_needs() -> None:
    """Tracing imports PyTorch's fake tensors, which training does not need."""
    users = {name.split(".")[1] for name, used in IMPORTS.items() if "titanlite.runtime.private_torch.tracing" in used}
    assert users
    assert users == {"tools"}


# Tests

TESTS = {path: ast.parse(path.read_text()) for path in sorted(Path("tests").rglob("test_*.py"))}


def test_no_test_module_imports_another() -> None:
    """Code of several test modules is in a helper module: tests/helpers.py, tests/layouts.py, tests/plans.py, ..."""
    found = {str(path): {name for name in imports(tree) if ".test_" in name} for path, tree in TESTS.items()}
    assert {path: names for path, names in found.items() if names} == {}


STARTS = {"subprocess.run", "subprocess.Popen", "titanlite", "run_train", "Process"}
LOOPS = ast.For | ast.While | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def started(call: ast.Call, functions: dict[str, ast.FunctionDef]) -> int:
    """Count the processes that one call starts, itself or in a function of its module. Two stand for several."""
    name, text = ast.unparse(call.func), ast.unparse(call)
    last = name.rpartition(".")[2]
    if name in ("on_every_layout", "each_on_every_layout") or "torch.distributed.run" in text or "NPROC" in text:
        return 2
    if name in ("run_ranks", "run_in_turn"):
        return 1 if ast.unparse(call.args[1]) == "1" else 2
    if last == "Pool":
        return 1 if text.endswith("Pool(1)") else 2
    if name in functions:
        return processes(functions[name], {other: it for other, it in functions.items() if other != name})
    return int(name in STARTS or last in STARTS)


def processes(function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> int:
    """Count the processes that a function starts; what a loop repeats counts twice."""
    inner = {node.name: node for node in ast.walk(function) if isinstance(node, ast.FunctionDef)}
    del inner[function.name]

    def count(node: ast.AST, times: int) -> int:
        if isinstance(node, ast.FunctionDef) and node is not function:
            return 0  # counted where it is called
        own = times * started(node, functions | inner) if isinstance(node, ast.Call) else 0
        repeated = 2 * times if isinstance(node, LOOPS) else times
        first = node.iter if isinstance(node, ast.For) else None
        children = ast.iter_child_nodes(node)
        return own + sum(count(child, times if child is first else repeated) for child in children)

    return count(function, 1)


@pytest.mark.long
def test_unit_tests_start_one_process_at_most() -> None:
    """Tests with several processes are in tests/distributed. Workers of loaders and of `data prepare` do not count."""
    several = set()
    for path, tree in TESTS.items():
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        if path.parent.name == "unit":
            tests = {name: node for name, node in functions.items() if name.startswith("test_")}
            several |= {f"{path.name}:{name}" for name, node in tests.items() if processes(node, functions) > 1}
    assert several == set()


def test_what_the_count_of_processes_finds() -> None:
    source = """
def once(): subprocess.run(["a"])
def test_one(): once()
def test_ranks(): run_ranks(f, 1, config)
def test_two():
    once()
    once()
def test_loop():
    for name in names: once()
def test_many(): run_in_turn(f, 2, configs)
def test_pool(): multiprocessing.Pool(2)
def test_inner():
    def inner(): once()
    inner(), inner()
"""
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    found = {name: processes(node, functions) for name, node in functions.items()}
    assert found == {
        "once": 1, "test_one": 1, "test_ranks": 1, "test_two": 2, "test_loop": 2, "test_many": 2, "test_pool": 2,
        "test_inner": 2,
    }  # fmt: skip
