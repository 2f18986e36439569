"""Tensor parallelism: runs whose ranks split layers equal runs of one process."""

import json
import math
import shutil
from typing import Any

import pytest

from tests.helpers import TinyRun, run_in_turn, train_on_this_rank
from tests.layouts import built, degrees, optimizer_moments, whole
from titanlite.config.schema import Config
from titanlite.runtime.private_torch.tensors import local_tensor

SIZES = "dim=36, n_layers=2, n_heads=6, n_kv_heads=2, hidden_dim=70, vocab_size=262"
LLAMA = [f"--model.args={{{SIZES}}}"]
"""35 of 70 rows on each of two ranks: FSDP shards them unevenly."""
QWEN = ["--model.name=qwen3", f"--model.args={{{SIZES}, head_dim=14, tied_head=false}}", "--optimizer.lr=1e-3"]
MASK = ["--data.document_mask"]
TECHNIQUES = {"qwen3-mask-AC-z": [*QWEN, *MASK, "--activation_checkpoint.mode=selective", "--training.z_loss=1e-3"]}
FURTHER = {
    "plain": LLAMA,
    "AC": [*LLAMA, "--activation_checkpoint.mode=full", "--training.local_batch_size=2"],
    "in-backward": [*LLAMA, "--optimizer.in_backward", "--training.max_norm=0"],
    "compile": [*LLAMA, *MASK, "--compile.enable"],
    "qwen3-compile-AC": [*QWEN, *MASK, "--compile.enable", "--activation_checkpoint.mode=full"],
    "offload": [*LLAMA, "--training.enable_cpu_offload"],
    "Muon": [*LLAMA, "--optimizer.name=Muon", '--optimizer.args={ns_dtype="float32"}'],
    "tied": [f"--model.args={{{SIZES}, tied_head=true}}"],
    "uneven": [*QWEN, "--model.args.dim=35"],
    "frozen": [*LLAMA, '--freeze.parameters=["tok_embeddings.*", "layers.0.attention.*"]'],
}
ONE, TWO = (1, 1), (1, 1, 1, 2)


def finished(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """Whole parameters after training, and this rank's parts of those that are not split over layers' ranks."""
    run = train_on_this_rank(config, rank, world_size)
    parameters = dict(run.model.named_parameters())
    replicas = {name: local_tensor(p).detach().numpy() for name, p in parameters.items() if "norm" in name}
    return {"whole": {name: whole(p).float().numpy() for name, p in parameters.items()}, "replicas": replicas}


def in_order(rank: int, world_size: int, call: tuple[Any, Config]) -> Any:
    function, config = call
    return function(rank, world_size, config)


def values(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """Whole parameters as they are drawn or loaded, before any step."""
    run = built(rank, world_size, config)
    return {name: whole(p).float().numpy() for name, p in run.model.named_parameters()}


def equal(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Names of tensors that differ in a bit."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not (ours[name] == theirs[name]).all()]


def compared(tiny: TinyRun, techniques: dict[str, list[str]], layouts: list[tuple[int, ...]]) -> None:
    """Train on each layout and on one process, and compare losses, gradient norms and validation losses.

    Replicas have the same bits on ranks that split layers, and one process loads the bits that they have saved.
    """
    common = ["--training.steps=20", "--validation.enable", "--validation.freq=20", f"--validation.path={tiny.text}"]
    results = {}
    for layout in [*layouts, ONE]:
        world_size = math.prod(layout)
        names = [f"{name}-{'-'.join(map(str, layout))}" for name in techniques]
        configs = [
            tiny.config(*common, *options, *degrees(*layout), f"--job.name={name}", world_size=world_size)
            for name, options in zip(names, techniques.values(), strict=True)
        ]
        results |= dict(zip(names, run_in_turn(finished, world_size, configs, timeout=600), strict=True))
    loads = [
        (values, tiny.config(*common, *options, *degrees(*ONE), f"--job.name={name}-{'-'.join(map(str, layouts[0]))}"))
        for name, options in techniques.items()
    ]
    for technique, [loaded] in zip(techniques, run_in_turn(in_order, 1, loads), strict=True):  # pyright: ignore[reportArgumentType]
        assert equal(results[f"{technique}-{'-'.join(map(str, layouts[0]))}"][0]["whole"], loaded) == []
    for technique in techniques:
        first = f"{technique}-1-1"
        reference = tiny.records(first)
        assert len(reference) == 20
        for layout in layouts:
            name = f"{technique}-{'-'.join(map(str, layout))}"
            found = tiny.records(name)
            for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
                expected = [record[key] for record in reference]
                assert [record[key] for record in found] == pytest.approx(expected, rel=tolerance), (name, key)
            assert [it["samples"] for it in found] == [it["samples"] for it in reference]
            ends = [
                json.loads((tiny.folder / "outputs" / it / "validation.jsonl").read_text())["loss"]
                for it in (first, name)
            ]
            assert ends[1] == pytest.approx(ends[0], rel=1e-5)
            for parameter, value in results[first][0]["whole"].items():
                assert results[name][0]["whole"][parameter] == pytest.approx(value, abs=1e-3), (name, parameter)
            for rank, neighbour in zip(results[name][::2], results[name][1::2], strict=True):
                for parameter, part in rank["replicas"].items():
                    assert (part == neighbour["replicas"][parameter]).all(), (name, parameter)


@pytest.mark.slow
def test_two_ranks_that_split_layers_train_as_one(tiny: TinyRun) -> None:
    compared(tiny, TECHNIQUES, [TWO])


OWN_MODEL = """
from typing import ClassVar
import torch.nn.functional as F
from torch import nn
from titanlite.models.llama3 import Llama3
from titanlite.models.initial import Constant
from titanlite.models.tensor_plan import TensorPlan

class Wide(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim, bias=False)
        self.scale = nn.Parameter(self.up.weight.new_empty(1))

    def forward(self, x):
        return self.down(F.gelu(self.up(x)) * self.scale)

class Own(Llama3):
    draws_random = False
    tensor_plan: ClassVar[TensorPlan] = {
        "layers.*.feed_forward": "split", "*.up": "columns", "*.down": "rows", "head.output": "vocabulary",
    }

    def build_feed_forward(self):
        return Wide(self.args.dim, self.args.hidden_dim)

    def init_weight(self, name, shape):
        ends = {"bias": Constant(0.1), "scale": Constant(0.5)}
        name = name.replace("up.", "w1.").replace("down.", "w2.")
        return ends.get(name.rpartition(".")[2]) or super().init_weight(name, shape)
"""
"""A model whose table splits less: a bias of columns, a whole parameter in a split module, a whole embedding."""


@pytest.mark.nightly
def test_a_model_of_ones_own(tiny: TinyRun) -> None:
    (tiny.folder / "own.py").write_text(OWN_MODEL)
    own = [f"--model.file={tiny.folder}/own.py", "--model.name=Own", *LLAMA]
    compared(tiny, {"own": own, "own-compile": [*own, "--compile.enable"]}, [TWO])


@pytest.mark.nightly
def test_further_techniques(tiny: TinyRun) -> None:
    compared(tiny, FURTHER, [TWO])


@pytest.mark.nightly
def test_four_ranks(tiny: TinyRun) -> None:
    compared(tiny, TECHNIQUES | FURTHER, [(1, 2, 1, 2), (2, 1, 1, 2), (1, 1, 2, 2)])


@pytest.mark.nightly
def test_initial_weights_and_checkpoints_are_those_of_one_process(tiny: TinyRun) -> None:
    """Saved by two ranks that split layers; loaded on one, on two that shard, and on two that split. Then the reverse.

    Parameters and moments are the same bits, and runs continue alike.
    """
    layouts = {"one": (1, 1), "shard": (1, 2), "tensor": TWO}

    def config(name: str, layout: str, steps: int = 3) -> Config:
        options = [*QWEN, *degrees(*layouts[layout]), f"--job.name={name}", f"--training.steps={steps}"]
        return tiny.config(*options, world_size=math.prod(layouts[layout]))

    def on(layout: str, *calls: tuple[Any, Config]) -> list[Any]:
        return [found[0] for found in run_in_turn(in_order, math.prod(layouts[layout]), calls)]  # pyright: ignore[reportArgumentType]

    outputs = tiny.folder / "outputs"
    [drawn] = on("one", (values, config("drawn", "one")))
    drawn_split, _, saved, moments = on(
        "tensor", (values, config("drawn-split", "tensor")), (finished, config("saved", "tensor")),
        (values, config("saved", "tensor")), (optimizer_moments, config("saved", "tensor")),
    )  # fmt: skip
    assert equal(drawn, drawn_split) == []
    for layout in ("one", "shard"):
        shutil.copytree(outputs / "saved", outputs / layout)
        loaded, loaded_moments, _ = on(
            layout, (values, config(layout, layout)), (optimizer_moments, config(layout, layout)),
            (finished, config(layout, layout, 6)),
        )  # fmt: skip
        assert equal(saved, loaded) == []
        assert equal(moments, loaded_moments) == []
        assert tiny.losses(layout) == pytest.approx(tiny.losses("one"), rel=1e-5)
    [own] = on("one", (values, config("one", "one", 6)))
    shutil.copytree(outputs / "one", outputs / "back")
    [back] = on("tensor", (values, config("back", "tensor", 6)))
    assert equal(own, back) == []


@pytest.mark.nightly
def test_saved_by_four_ranks_loads_on_each_layout(tiny: TinyRun) -> None:
    """Saved on shard 2 x tensor 2: the same bits of parameters and moments elsewhere, and the same samples."""
    outputs = tiny.folder / "outputs"
    places = {"split": (1, 2, 1, 2), "one": (1, 1), "4-1": (4, 1), "1-4": (1, 4), "context": (1, 2, 2)}

    def config(name: str, place: tuple[int, ...], steps: int = 3) -> Config:
        options = [*QWEN, *degrees(*place), f"--job.name={name}", f"--training.steps={steps}"]
        return tiny.config(*options, world_size=math.prod(place))

    def on(place: tuple[int, ...], *calls: tuple[Any, Config]) -> list[Any]:
        return [found[0] for found in run_in_turn(in_order, math.prod(place), calls)]  # pyright: ignore[reportArgumentType]

    on((1, 1), (finished, config("whole", (1, 1), 6)))
    split = places["split"]
    _, saved, moments = on(
        split, (finished, config("saved", split)), (values, config("saved", split)),
        (optimizer_moments, config("saved", split)),
    )  # fmt: skip
    for name, place in places.items():
        shutil.copytree(outputs / "saved", outputs / name)
        loaded, loaded_moments, _ = on(
            place, (values, config(name, place)), (optimizer_moments, config(name, place)),
            (finished, config(name, place, 6)),
        )  # fmt: skip
        assert equal(saved, loaded) == [], name
        assert equal(moments, loaded_moments) == [], name
        assert tiny.losses(name) == pytest.approx(tiny.losses("whole"), rel=1e-5), name
        assert [it["samples"] for it in tiny.records(name)] == [it["samples"] for it in tiny.records("whole")], name
