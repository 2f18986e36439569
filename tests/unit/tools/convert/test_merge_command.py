"""`titanlite checkpoint merge`, and the commands and runs that read what it has written."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.foreign import oracle_of
from tests.support.helpers import TinyRun, mentions, one_process
from tests.support.manifests import flip
from tests.support.weights import random_model, save_model, small_toml
from tests.support.whole_runs import trained
from titanlite.ops.mean import rounded_once
from titanlite.tools import cli
from titanlite.tools.convert.source import open_model, open_source, read_tensor


def merged(*words: str | Path) -> int:
    return cli.run(["checkpoint", "merge", *map(str, words)])


def save(folder: Path, family: str = "llama3", *, steps: int = 1, dtype: str = "float32", **args: Any) -> list[Path]:
    """Save checkpoints of a run, with random weights, and return their folders."""
    folder.mkdir(exist_ok=True)
    toml = folder / "small.toml"
    toml.write_text(small_toml(family, dtype=dtype, **args))
    model = random_model(toml)
    saved, generator = [], torch.Generator().manual_seed(4)
    with one_process():
        for step in range(1, steps + 1):
            for tensor in model.state_dict().values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            saved.append(save_model(folder, model, toml, step=step))
    return saved


def stored(path: Path) -> dict[str, torch.Tensor]:
    source = open_source(str(path))
    names = [name.removeprefix("model.") for name in source.metadata.state_dict_metadata if name.startswith("model.")]
    return {name: read_tensor(source, name) for name in names}


def assert_nearest(rounded: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that no neighbour of a rounded value is nearer to the exact one."""
    distance = (rounded.double() - exact).abs()
    for towards in (torch.inf, -torch.inf):
        neighbour = rounded.nextafter(torch.full_like(rounded, towards))
        assert (distance <= (neighbour.double() - exact).abs()).all()


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "dtype", "weights"), [("qwen3_moe", "bfloat16", (1.0, 1.0, 1.0)), ("llama3", "float32", (1.0, 1.0, 2.5))]
)
def test_the_mean_is_that_of_float64(family: str, dtype: str, weights: tuple[float, ...], tmp_path: Path) -> None:
    checkpoints = save(tmp_path / "run", family, steps=3, dtype=dtype, tied_head=True)
    values = [stored(path) for path in checkpoints]
    words = ["--weights", *map(str, weights)] if weights[2] != 1 else []
    assert merged(*checkpoints, "--out", tmp_path / "mean", *words) == 0
    found = stored(tmp_path / "mean" / "step-00000000")
    assert found.keys() == values[0].keys()
    for name, tensor in found.items():
        a, b, c = (weight * value[name].double() for weight, value in zip(weights, values, strict=True))
        assert tensor.dtype == values[0][name].dtype
        assert_nearest(tensor, (a + b + c) / sum(weights))
    assert open_source(str(tmp_path / "mean")).spec == open_source(str(tmp_path / "run")).spec


def test_narrow_dtypes_are_rounded_once() -> None:
    """By way of float32, the first of these would become a tie in bfloat16, and then 1."""
    above, below = 1 + 2**-8 + 2**-40, 1 + 3 * 2**-8 - 2**-40
    values = torch.tensor([above, below, -above, 1 + 2**-8, 0.0, torch.inf, 1e300], dtype=torch.float64)
    expected = [1 + 2**-7, 1 + 2**-7, -1 - 2**-7, 1.0, 0.0, torch.inf, torch.inf]
    assert rounded_once(values, torch.bfloat16).tolist() == expected
    assert values[0].to(torch.bfloat16) == 1.0, "PyTorch rounds twice: without that, rounded_once is not needed"


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_runs_and_commands_take_a_merged_checkpoint(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    values = [trained(tiny.config(f"--job.name={name}", f"--debug.seed={seed}")) for seed, name in enumerate("ab")]
    runs = [tiny.folder / "outputs" / name for name in "ab"]
    assert merged(*runs, "--out", tiny.folder / "mean") == 0
    assert mentions(capfd.readouterr().out, f"{tiny.folder}/mean/step-00000000")
    found = stored(tiny.folder / "mean")
    for name, tensor in found.items():
        assert torch.equal(tensor, ((values[0][name].double() + values[1][name].double()) / 2).float())
    options = ["--training.steps=1", "--lr_scheduler.warmup_steps=1", "--optimizer.lr=0.0"]
    again = trained(tiny.config(*options, "--job.name=c", f"--checkpoint.initial_load_path={tiny.folder}/mean"))
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())
    mean = str(tiny.folder / "mean")
    assert cli.run(["checkpoint", "verify", mean]) == 0
    assert cli.run(["checkpoint", "export", mean, "--out", f"{mean}_hf"]) == 0
    assert cli.run(["generate", mean, "--prompt", "a", "--max-new-tokens", "1"]) == 0


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_the_folder_of_a_run_means_its_own_checkpoints(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    """No checkpoint is written beside them, and one that stands there is not taken for the newest of the run."""
    trained(tiny.config("--job.name=own"))
    run, mean = tiny.folder / "outputs" / "own", tiny.folder / "other"
    link = tiny.folder / "link"
    link.symlink_to(run)
    for out in (run, run / "checkpoints", run / "deeper" / "still", link, link / "new"):
        assert merged(run, run, "--out", out) == 2
        assert mentions(capfd.readouterr().err, run) or out == run / "checkpoints"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000006"]
    assert merged(run, run, "--out", mean) == 0
    shutil.copytree(mean / "step-00000000", run / "step-00000000")
    assert open_source(str(run)).where == f"{run}/checkpoints/step-00000006"
    assert open_model(str(run), None, "teacher").where == f"{run}/checkpoints/step-00000006"
    assert cli.run(["checkpoint", "show", str(run)]) == 0
    assert mentions(capfd.readouterr().out, f"{run}/checkpoints/step-00000006")
    options = ["--training.steps=1", "--lr_scheduler.warmup_steps=1", "--optimizer.lr=0.0"]
    again = trained(tiny.config(*options, "--job.name=from_own", f"--checkpoint.initial_load_path={run}"))
    assert all(torch.equal(again[name], tensor) for name, tensor in stored(run / "checkpoints").items())
    assert cli.run(["checkpoint", "prune", str(run), "--keep-latest-k", "1"]) == 0


@pytest.mark.long
def test_mistakes_and_damage_are_one_line_each(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second, third = save(tmp_path / "run", steps=3)
    deeper, wide, theta, narrow = (
        save(tmp_path / name, **args)[0]
        for name, args in {
            "deeper": {"n_layers": 3}, "wide": {"hidden_dim": 48}, "theta": {"rope_theta": 7.0},
            "narrow": {"dtype": "bfloat16"},
        }.items()
    )  # fmt: skip
    oracle_of("qwen3_moe").save_pretrained(tmp_path / "experts")
    damaged = third / "__0_0.distcp"
    flip(damaged, damaged.stat().st_size // 2)
    out = tmp_path / "out"
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    capfd.readouterr()
    for words, named in (
        ([first], "two"),
        ([first, deeper], "model.args.n_layers"),
        ([first, wide], "layers.0.feed_forward.w1.weight"),
        ([first, narrow], "tok_embeddings.weight"),
        ([first, theta], "model.args.rope_theta"),
        ([first, tmp_path / "gone"], "gone"),
        ([first, third], damaged),
        ([first, tmp_path / "experts"], "titanlite checkpoint import"),
        ([first, second, "--weights", "1", "1", "2"], "--weights"),
        ([first, second, third, "--weights", "1", "1", "-2"], "--weights"),
        ([first, second, "--weights", "1", "nan"], "--weights"),
        ([first, second, "--weights", "1", "x"], "--weights"),
        ([first, second, "--out", first.parent], "step-00000001"),
        ([first, second, "--out", tmp_path / "run" / "small.toml"], "small.toml"),
        ([first, second, "--out", tmp_path / "nowhere"], "nowhere"),
    ):
        assert merged("--out", out, *words) == 2
        printed = capfd.readouterr()
        assert len(printed.err.splitlines()) == 1, printed.err
        assert mentions(printed.err, named), printed.err
    assert not out.exists() or not [*out.iterdir()]
