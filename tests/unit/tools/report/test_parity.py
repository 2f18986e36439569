"""`titanlite parity`: the variants, the comparison and the table."""

import math

import pytest

from tests.support.helpers import TinyRun, mentions
from titanlite.config.load import load
from titanlite.tools import cli
from titanlite.tools.report.parity import ONE, Curve, compare, error_in, further_layouts, variants, with_equal_bits


def test_further_axes_are_compared_where_the_config_allows_them(tiny: TinyRun) -> None:
    def names(*options: str) -> list[str]:
        return [name for name, _ in further_layouts(str(tiny.toml), list(options), 4)]

    assert names() == ["context 2 x FSDP 2", "context 4 x FSDP 1"]  # 3 heads cannot be split
    even = ["--model.args.dim=48", "--model.args.n_heads=2", "--model.args.n_kv_heads=2", "--model.args.vocab_size=260"]
    assert names(*even) == [
        "context 2 x FSDP 2", "context 4 x FSDP 1", "tensor 2 x FSDP 2", "context 2 x tensor 2 x FSDP 1",
    ]  # fmt: skip
    assert names("--training.seq_len=6") == []
    moe = "--model={name='qwen3_moe', flavor='debug', args={vocab_size=259}}"
    experts = ["context 2 x FSDP 2", "expert 2 x FSDP 4", "expert 4 x FSDP 4"]
    assert names(moe, "--training.seq_len=4", "--model.args.vocab_size=260") == [
        *experts, "tensor 2 x FSDP 2", "context 2 x tensor 2 x FSDP 1", "context 2 x expert 2 x FSDP 2",
        "expert 2 x tensor 2 x FSDP 2", "pipeline 2 x FSDP 2", "pipeline 2 x tensor 2 x FSDP 1",
    ]  # fmt: skip
    [first, *_] = variants(8, 4, on_gpu=False, further=further_layouts(str(tiny.toml), [], 4))[-2:]
    assert (first.name, first.exact, first.reference) == ("context 2 x FSDP 2", False, ONE)
    assert first.options[-4:] == (
        "parallelism.context_parallel_degree=2", "parallelism.expert_parallel_degree=1",
        "parallelism.tensor_parallel_degree=1", "parallelism.pipeline_parallel_degree=1",
    )  # fmt: skip


def test_with_reproducible_layouts_every_layout_must_equal_one_process() -> None:
    found = {variant.name: variant for variant in with_equal_bits(variants(8, 4, on_gpu=False))}
    for name in ("DDP 4 x 1", "FSDP 1 x 4", "HSDP 2 x 2", "the same again"):
        assert (found[name].exact, found[name].reference) == (True, ONE)
    assert (found["FSDP, CPU offload"].exact, found["FSDP, CPU offload"].reference) == (True, "FSDP 1 x 4")
    on_gpu = {variant.name: variant for variant in with_equal_bits(variants(8, 4, on_gpu=True))}
    assert not on_gpu["FSDP, CPU offload"].exact, "the optimizer computes on the CPU there"
    assert not found["compile"].exact, "fused kernels round in other places"
    assert not [name for name in found if "micro-batches" in name], "the option needs micro-batches of one sequence"


@pytest.mark.parametrize(
    ("losses", "exact", "is_equal", "difference"),
    [
        ([2.0, 1.0], True, True, 0),
        ([2.0, 1.0 + 1e-15], True, False, 1e-15),
        ([2.0, 1.0 + 9e-6], False, True, 9e-6),
        ([2.0 + 3e-5, 1.0], False, False, 1.5e-5),
        ([2.0], False, False, math.inf),
        ([2.0, None], False, False, math.inf),  # not finite
    ],
)
def test_equal_or_not(losses: list[float | None], exact: bool, is_equal: bool, difference: float) -> None:
    reference = Curve([2.0, 1.0], [1.0, 1.0])
    norms: list[float | None] = [1.0] * len(losses)
    found = compare(Curve(losses, norms), reference, exact=exact, tolerance=1e-5)
    assert found.is_equal == is_equal
    assert found.loss == pytest.approx(difference, rel=0.2)
    assert not compare(Curve([2.0, 1.0], [1.0, 1.1]), reference, exact=True, tolerance=1e-5).is_equal
    hashed = Curve([2.0, 1.0], [1.0, 1.0], ["a", "b"])
    assert not compare(hashed, Curve([2.0, 1.0], [1.0, 1.0], ["a", "c"]), exact=True, tolerance=1e-5).is_equal


def test_a_config_of_many_processes_can_be_compared(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config's layout is replaced. A variant that is not finite does not end the others."""
    ran = []

    def run(command: list[str], processes: int, folder: object) -> Curve:
        config = load(command[2], command[3:], world_size=processes)
        ran.append((processes, config.parallelism.degrees(processes), config.parallelism.fsdp_reshard_after_forward))
        return Curve([2.0, None if processes == 4 else 1.0], [1.0, 1.0])

    monkeypatch.setattr("titanlite.tools.report.parity._run", run)
    layout = ["data_parallel_replicate_degree=3", "data_parallel_shard_degree=5", "fsdp_reshard_after_forward=5"]
    (tiny.folder / "outputs" / "tiny-parity").mkdir(parents=True)
    arguments = ["--config", str(tiny.toml), *(f"--parallelism.{option}" for option in layout)]
    assert cli.run(["parity", *arguments, "--processes=4"]) == 1
    assert ran[0] == (1, (1, 1, 1, 1, 1), "default")
    layouts = {(4, 1, 1, 1, 1), (1, 4, 1, 1, 1), (2, 2, 1, 1, 1), (1, 2, 2, 1, 1), (1, 1, 4, 1, 1)}
    assert {(4, (1, 4, 1, 1, 1), 2), *((4, layout, "default") for layout in layouts)} <= set(ran)
    assert len(ran) == 21
    assert cli.run(["parity", *arguments, "--processes=4", "--model.args.n_layers=2"]) == 1
    assert (4, (1, 2, 1, 1, 2), "default") in ran


def test_mistakes_are_reported_before_anything_is_trained(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    cases = {
        "--training.stepss=3": ["training.stepss", "training.steps"],
        "--steps=0": ["--steps", "'0'"],
        "--steps=x": ["--steps", "'x'"],
        "--only=hsdp": ["--only", "'hsdp'", "1 process", "the same again"],
        "--processes=3": ["--processes", 8, "training.global_batch_size", 3],
    }
    for argument, named in cases.items():
        assert cli.run(["parity", "--config", str(tiny.toml), argument]) == 2
        assert mentions(capfd.readouterr().err.splitlines()[0], "error", *named)
    assert not (tiny.folder / "outputs").exists()


def test_a_failed_run_is_explained_by_its_own_error() -> None:
    lines = ["W1123 x.py: this will be an error in a later version", "model    llama3", "error: data.path: is empty"]
    assert error_in(lines) == "error: data.path: is empty"
    assert error_in(["model    llama3", "RuntimeError: too large"]) == "RuntimeError: too large"
    assert error_in(["model    llama3"]) is None
