"""Rules of the house, kept by tests: what imports what, what is replaced, and what is private."""

import ast
import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path("titanlite")
FILES = sorted(PACKAGE.rglob("*.py"))


def short(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


@cache
def trees() -> dict[Path, ast.Module]:
    gc.disable()  # it would look at 300,000 new objects again and again
    try:
        return {path: ast.parse(path.read_text()) for path in FILES}
    finally:
        gc.enable()


@cache
def nodes() -> dict[Path, list[ast.AST]]:
    """Every node of each file: to walk through all files takes half a second."""
    return {path: [*ast.walk(tree)] for path, tree in trees().items()}


def for_types(node: ast.AST) -> set[ast.AST]:
    """Return what a block `if TYPE_CHECKING` contains; nothing for any other node."""
    is_block = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return {*ast.walk(node)} if is_block else set()


@cache
def imports(path: Path) -> set[str]:
    """Names that a file imports, also inside functions: modules, and what it takes from them."""
    found: set[str] = set()
    left_out = {inner for node in nodes()[path] for inner in for_types(node)}
    for node in nodes()[path]:
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def imported_modules(path: Path) -> set[str]:
    """Modules of titanlite that a file imports, also inside functions."""
    names = imports(path)
    return {name for name in (*names, *(name.rpartition(".")[0] for name in names)) if name in MODULES} - (
        # `from titanlite.data import loader` takes the module loader, and nothing of the package's own file.
        {name.rpartition(".")[0] for name in names if name in MODULES}
    )


@cache
def all_imports() -> dict[str, set[str]]:
    return {name: imported_modules(path) for name, path in MODULES.items()}


# Rooms: folders of titanlite/, and the files beside them


def test_training_imports_no_tool() -> None:
    """Walk the imports from train.py; each way into titanlite/tools/ is shown as a chain."""
    # Techniques are imported by name, where a config asks for them.
    chains = {name: [name] for name in ("titanlite.train", *(module for module in MODULES if ".techniques." in module))}
    waiting = [*chains]
    while waiting:
        name = waiting.pop()
        for other in sorted(all_imports()[name] - chains.keys()):
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
    assert circles(all_imports()) == set()
    rooms: dict[str, set[str]] = {}
    for name, others in all_imports().items():
        rooms.setdefault(room_of(name), set()).update({room_of(other) for other in others} - {room_of(name)})
    assert len(rooms) > 15
    assert circles(rooms) == set()


def test_models_know_nothing_of_ranks_and_meshes() -> None:
    roots = ("torch.distributed", "titanlite.parallelize", "titanlite.techniques", "titanlite.mesh", "titanlite.data")
    forbidden = (*roots, "titanlite.train", "titanlite.runtime.process_group", "titanlite.runtime.ranks")
    for path in (PACKAGE / "models").glob("*.py"):
        assert not [name for name in imports(path) if name.startswith(forbidden)], path


# State, patches, and what is private


@pytest.mark.long
def test_no_module_level_state() -> None:
    for path, tree in trees().items():
        assert not [node for node in nodes()[path] if isinstance(node, ast.Global)], path
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


def patches(path: Path) -> Iterator[str]:
    """Yield what replaces parts of other modules, or reads another function's variables."""
    imported = {alias.asname or alias.name.split(".")[0] for node in nodes()[path]
                if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}  # fmt: skip
    yield from (name for name in imports(path) if name.startswith("unittest"))
    for node in nodes()[path]:
        if isinstance(node, ast.Attribute) and node.attr in ("f_locals", "_getframe", "tb_frame"):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
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
    "runtime/console.py": {
        "sys.stdout": "as in runtime/output.py; what is written is also logged",
        "sys.stderr": "as sys.stdout",
    },
    "models/pytorch_layers.py": {
        "module.__class__": "a layer of another library keeps its place, also where several objects refer to it",
    },
    "models/transformers.py": {
        "setattr(module, name, tensor)": "buffers that were built without memory get some",
        "setattr(module, INITIALIZED, False)": "transformers' mark: its initialization runs again, and is recorded",
        "setattr(parameter, INITIALIZED, True)": "the same mark: parameters are left alone while buffers are set",
    },
    "parallelize/activation_checkpoint.py": {
        "block.forward": "a wrapper module would stand in the names of parameters and in the checkpoint",
    },
    "parallelize/compile.py": {
        "block.forward": "Module.compile() compiles the hooks of FSDP too; only the forward is compiled here",
    },
    "techniques/activations/host.py": {
        "network.forward": "as block.forward: hooks of autograd stand around the whole pass",
    },
    "techniques/pipeline/passes.py": {
        "model.forward": "validation and tasks call the model, and go through all stages without knowing of them",
    },
    "techniques/pipeline/stages.py": {
        "setattr(model, name, part)": "a stage is the model's own forward, in which stand-ins replace what it has not",
        "setattr(model, name, child)": "after it, the model has its own children again",
        "setattr(model, name, kept)": "a rank keeps its blocks only, and their names in the model",
    },
    "techniques/reproducible/parts.py": {
        "layer.forward": "as block.forward: each layer is called once for each part of the sequences",
    },
    "tools/fork_server.py": {
        "sys.argv": "a fork has the words of the process whose place it takes",
        "sys.orig_argv": "as sys.argv",
        "util.spawnv_passfds": "Python's fork server has no other place for a server that is a fork",
    },
    "runtime/private_torch/elastic.py": {
        "SubprocessHandler._popen": "torchelastic has no other place for a worker that is no new process of a program",
    },
    "runtime/private_torch/fsdp.py": {
        "parameter.__class__": "quantized parameters keep their types; gathered parts of layers have hooks",
        "unit.__class__": "the plan records the collectives and the memory of each FSDP unit; no run does",
    },
    "runtime/private_torch/tracing.py": {
        "propagator.__class__": "the planner must not count tensors that metadata propagation makes",
    },
}
"""What titanlite replaces in other objects, by file, each with its reason."""


def test_what_is_replaced_is_listed_with_its_reason() -> None:
    """No mocks, no frames that are read, and no class, forward or attribute replaced but what is listed."""
    found = {short(path): set(patches(path)) for path in FILES}
    assert {path: names for path, names in found.items() if names} == {
        path: names.keys() for path, names in REPLACED.items()
    }


def test_private_modules_of_pytorch_are_imported_in_one_room() -> None:
    """That private attributes are used there alone is ruff's rule SLF001."""
    room = PACKAGE / "runtime" / "private_torch"
    names = {name for path in FILES if path.parent != room for name in imports(path)}
    assert [name for name in names if re.search(r"(^|\.)_(?!_)", name)] == []


def test_objects_of_pytorch_stay_in_one_room() -> None:
    """An object without a type would bring private attributes along, which no rule finds by their names."""
    room = PACKAGE / "runtime" / "private_torch"
    functions = [
        function
        for path in FILES
        if path.parent == room
        for function in trees()[path].body
        if isinstance(function, ast.FunctionDef)
    ]
    assert len(functions) > 40
    returned = {
        function.name: ast.unparse(function.returns)
        for function in functions
        if function.returns and not function.name.startswith("_")
    }
    assert [name for name, types in returned.items() if "Any" in types.split(" | ")] == []


NOTICED = "all_gather exchange_rows is_compiled non_persistent_buffers reduce_scatter replace_tensors storage_key"
"""What every run, every plan or each further axis of the mesh calls, so that its end would be noticed at once."""


def test_each_private_use_has_a_test() -> None:
    room = PACKAGE / "runtime" / "private_torch"
    offered = {
        node.name
        for path, tree in trees().items()
        for node in tree.body
        if path.parent == room and isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    called = {*re.findall(r"\w+", Path("tests/unit/runtime/test_private_torch.py").read_text().partition("\n\n\n")[2])}
    assert len(offered) > 30
    assert offered - called == {*NOTICED.split()}


def test_only_tools_import_what_tracing_needs() -> None:
    """Tracing imports PyTorch's fake tensors, which training does not need."""
    users = {
        name.split(".")[1] for name, used in all_imports().items() if "titanlite.runtime.private_torch.tracing" in used
    }
    assert users
    assert users == {"tools"}
