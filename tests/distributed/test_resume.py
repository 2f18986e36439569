"""Save on one layout, resume on another: nothing repeated, nothing skipped, nothing lost."""

import shutil
import subprocess
import sys

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.support.helpers import TinyRun, built, one_process, run_in_turn, run_ranks, train_on_this_rank
from tests.support.layouts import degrees, trained
from tests.support.whole_runs import assert_equal, values_of
from titanlite.checkpoint import manifest as manifests
from titanlite.schema import Config


@pytest.mark.slow
def test_saved_on_one_layout_loads_on_each(tiny: TinyRun) -> None:
    """Saved by four shards. Each other axis, and replicas alone: tests/distributed/test_elastic_axes.py."""
    outputs, (replicate, shard) = tiny.folder / "outputs", (1, 4)
    ranks, layout = replicate * shard, degrees(replicate, shard)
    config = tiny.config("--job.name=whole", "--checkpoint.interval=3", *layout, world_size=ranks)
    whole_run = run_ranks(trained, ranks, config)[0]
    shutil.copytree(outputs / "whole", outputs / "half")
    shutil.rmtree(outputs / "half" / "checkpoints" / manifests.folder_name(6))
    layouts = [(1, 1), (1, 4), (2, 2)]
    names = {other: f"on-{other[0]}-{other[1]}" for other in layouts}
    for name in names.values():
        shutil.copytree(outputs / "half", outputs / name)
    results = {}
    for world_size in (1, 4):
        others = [other for other in layouts if other[0] * other[1] == world_size]
        configs = [
            tiny.config(f"--job.name={names[layout]}", *degrees(*layout), world_size=world_size) for layout in others
        ]
        results |= dict(zip(others, (ranks[0] for ranks in run_in_turn(trained, world_size, configs)), strict=True))
    for other, weights in results.items():
        name = names[other]
        assert [record["step"] for record in tiny.records(name)] == [1, 2, 3, 4, 5, 6]
        assert tiny.losses(name) == pytest.approx(tiny.losses("whole"), rel=1e-5)
        if other == (replicate, shard):
            assert tiny.losses(name) == tiny.losses("whole")
            for parameter, value in weights.items():
                assert (value == whole_run[parameter]).all(), parameter


def values_after_training(rank: int, world_size: int, config: Config) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer state at the end of a run."""
    return values_of(train_on_this_rank(config, rank, world_size))


def test_a_tied_model_and_its_optimizer_survive_the_change_of_layout(tiny: TinyRun) -> None:
    tied = "--model.args.tied_head"
    config = tiny.config(tied, "--training.steps=3", *degrees(1, 2), world_size=2)
    expected = run_ranks(values_after_training, 2, config)[0]
    assert expected["layers.0.attention.wq.weight.step"] == 3
    with one_process():
        assert_equal(values_of(built(0, 1, tiny.config(tied))), expected)
    checkpoint = tiny.folder / "outputs" / "tiny" / "checkpoints" / manifests.folder_name(3)
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    assert "model.tok_embeddings.weight" in stored
    assert "model.head.output.weight" not in stored, "it is stored once"


@pytest.mark.nightly
def test_float8_run_resumes_without_float8(tiny: TinyRun) -> None:
    """The checkpoint holds plain tensors: no torchao is needed to read it."""
    sizes = ["--model.args.dim=48", "--model.args.hidden_dim=64", "--optimizer.lr=1e-3", *degrees(1, 2)]
    float8 = [f"--quantize.linear.float8.{option}" for option in ("enable", "emulate", "skip_small=false")]
    whole = tiny.config("--job.name=whole", "--training.steps=3", *sizes, *float8, world_size=2)
    expected = run_ranks(trained, 2, whole)[0]
    checkpoint = tiny.folder / "outputs" / "whole" / "checkpoints" / manifests.folder_name(3)
    code = (
        "import sys; from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as save; "
        "save(sys.argv[1], sys.argv[2]); assert 'torchao' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(checkpoint), str(tiny.folder / "whole.pt")], check=True)
    stored = torch.load(tiny.folder / "whole.pt", weights_only=True)["model"]
    for name, value in expected.items():
        assert (stored[name].numpy() == value).all(), name
    run_ranks(trained, 2, tiny.config("--job.name=whole", "--training.steps=4", *sizes, world_size=2))
    assert [record["step"] for record in tiny.records("whole")] == [1, 2, 3, 4]
