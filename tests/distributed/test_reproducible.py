"""`debug.reproducible_layouts`: the same bits on every layout, also after a kill on another one."""

import json
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers import TinyRun, run_in_turn, run_ranks, train_on_this_rank
from tests.layouts import degrees
from titanlite.schema import Config
from titanlite.techniques.reproducible import sums
from titanlite.tools import cli

ON = ["--debug.reproducible_layouts", "--training.local_batch_size=1", "--training.global_batch_size=8"]
SETTINGS = [*ON, "--training.steps=4", "--checkpoint.interval=2", "--debug.hash_freq=1", "--optimizer.lr=3e-3"]
PAIRS = "--training.local_batch_size=2"


SPARSE = ["--model={name='qwen3_moe', flavor='debug', args={dim=32, n_layers=2, vocab_size=259}}"]


def other_tree_sum(parts: Tensor) -> Tensor:
    """Add the second half of the parts to the first one: a tree, but another one."""
    while len(parts) > 1:
        parts = parts[: len(parts) // 2] + parts[len(parts) // 2 :]
    return parts[0]


def train(rank: int, world_size: int, config: Config) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if config.job.name == "other-order":
            patch.setattr(sums, "tree_sum", other_tree_sum)
        train_on_this_rank(config, rank, world_size)


def hashes(tiny: TinyRun, name: str) -> list[str]:
    """The hash after each step."""
    lines = (tiny.folder / "outputs" / name / "hashes.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    return [json.loads(line)["hash"] for line in lines]


def run_on(tiny: TinyRun, layouts: dict[str, tuple[int, int]], *options: str) -> None:
    for world_size in sorted({replicate * shard for replicate, shard in layouts.values()}):
        configs = [
            tiny.config(*SETTINGS, *options, *degrees(*layout), f"--job.name={name}", world_size=world_size)
            for name, layout in layouts.items()
            if layout[0] * layout[1] == world_size
        ]
        run_in_turn(train, world_size, configs)


def test_two_ranks_have_the_bits_of_one(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    run_on(tiny, {"one": (1, 1), "sharded": (1, 2), "replicas": (2, 1)})
    one = hashes(tiny, "one")
    assert len({*one}) == 4
    assert hashes(tiny, "sharded") == hashes(tiny, "replicas") == one
    values = [[(it["loss"], it["grad_norm"]) for it in tiny.records(name)] for name in ("one", "sharded", "replicas")]
    assert values[0] == values[1] == values[2]
    for name in ("one", "sharded"):
        assert cli.run(["checkpoint", "hash", str(tiny.folder / "outputs" / name)]) == 0
        assert capfd.readouterr().out.strip() == one[-1]


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([(1, 4), (2, 2)], marks=pytest.mark.slow),
        pytest.param([(1, 2), (2, 1), (1, 4), (2, 2), (4, 1)], marks=pytest.mark.nightly),
    ],
    ids=["some", "all"],
)
def test_every_layout_and_a_resume_on_another_have_one_hash(tiny: TinyRun, layouts: list[tuple[int, int]]) -> None:
    """Micro-batches of two sequences: four in a step."""
    run_on(tiny, {f"on-{r}-{s}": (r, s) for r, s in [(1, 1), *layouts]} | {"other-order": (1, 4)}, PAIRS)
    one = hashes(tiny, "on-1-1")
    for replicate, shard in layouts:
        assert hashes(tiny, f"on-{replicate}-{shard}") == one, (replicate, shard)
    outputs = tiny.folder / "outputs"
    shutil.rmtree(outputs / "on-1-4" / "checkpoints" / "step-00000004")  # killed after step 2 on four ranks
    run_on(tiny, {"on-1-4": (2, 1)}, PAIRS)
    assert hashes(tiny, "on-1-4") == one
    assert hashes(tiny, "other-order")[0] != one[0], "control: another tree"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        ["--training.mixed_precision_param=bfloat16"],
        ["--data.document_mask", "--activation_checkpoint.mode=full"],
        ["--optimizer.name=Muon"],
        ["--lora.rank=4"],
        ["--training.enable_cpu_offload"],
        ["--compile.enable"],
        ["--training.dtype=bfloat16"],
        ["--optimizer.state_dtype=bfloat16"],
        [*SPARSE, PAIRS],
        ["--model.name=qwen3", "--model.args.head_dim=10", PAIRS],
    ],
    ids=lambda options: options[0],
)
def test_techniques_have_one_hash(tiny: TinyRun, options: list[str]) -> None:
    run_on(tiny, {"one": (1, 1), "four": (2, 2)}, *options)
    assert hashes(tiny, "one") == hashes(tiny, "four")


def exact(rank: int, world_size: int, values: list[float]) -> tuple[float, float]:
    group = dist.group.WORLD
    assert group is not None
    part = torch.tensor(values)[rank::world_size]
    bad = torch.tensor([torch.nan if rank == 1 else 1.0])
    found = sums.exact_sums([part, bad], group)
    return float(found[0]), float(found[1])


def test_sums_over_ranks_do_not_depend_on_who_has_what() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).mul(1e3).tolist()
    values = torch.tensor(values).tolist()  # float32
    [one] = run_ranks(exact, 1, values)
    two = run_ranks(exact, 2, values)
    assert two[0][0] == two[1][0] == one[0]
    assert one[0] == pytest.approx(float(sum(map(Fraction, values))), abs=1e3 * 2**-33 * 1000)
    assert one[1] == 1
    assert two[0][1] == two[1][1] == float("inf"), "an element of rank 1 is not finite"


@pytest.mark.nightly
def test_a_distilled_run_has_one_hash(tiny: TinyRun) -> None:
    run_in_turn(train, 1, [tiny.config("--training.steps=2", "--job.name=teacher")])
    teacher = f"--teacher.path={tiny.folder}/outputs/teacher"
    run_on(tiny, {"one": (1, 1), "four": (2, 2)}, teacher, "--distill.ratio=0.6")
    assert hashes(tiny, "one") == hashes(tiny, "four")


@pytest.mark.nightly
def test_parity_compares_bits_and_names_the_first_tensor_that_differs(
    tiny: TinyRun, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["parity", "--config", str(tiny.toml), "--steps=2", "--processes=2", "--only=FSDP 1 x 2", *ON]
    assert cli.run(arguments) == 0
    cells = [cell.strip() for cell in capfd.readouterr().out.splitlines()[-2].split("|")[1:-1]]
    assert [cells[0], *cells[4:]] == ["FSDP 1 x 2", "0.0e+00", "0.0e+00", "equal to 1 process", "yes"]
    broken = tmp_path / "broken.py"  # rank 1 computes something else
    broken.write_text(
        "import os\nfrom titanlite.models.llama3 import Llama3\n\n\nclass Broken(Llama3):\n"
        "    def __init__(self, args):\n        super().__init__(args)\n"
        "        factor = 1.001 if os.environ.get('RANK') == '1' else 1.0\n"
        "        self.tok_embeddings.register_forward_hook(lambda module, args, output: output * factor)\n"
    )
    assert cli.run([*arguments, f"--model.file={broken}", "--model.name=Broken"]) == 1
    assert "step 1: first tensor that differs: " in capfd.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [(1, 2, 1, 2), (1, 2, 1, 1, 2)], ids=["tensor", "expert"])
def test_the_hash_of_a_run_is_that_of_its_checkpoint_on_further_axes(
    tiny: TinyRun, capfd: pytest.CaptureFixture[str], layout: tuple[int, ...]
) -> None:
    """Parameters are split along several dims there."""
    dense = "--model.args={dim=48, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=42, vocab_size=260}"
    ranks = layout[0] * layout[1] * (layout[3] if len(layout) == 4 else 1)
    options = [
        *(SPARSE if len(layout) == 5 else [dense]),
        "--training.steps=4",
        "--debug.hash_freq=1",
        "--checkpoint.interval=4",
    ]
    run_in_turn(train, ranks, [tiny.config(*options, *degrees(*layout), world_size=ranks)])
    assert cli.run(["checkpoint", "hash", str(tiny.folder / "outputs" / "tiny")]) == 0
    assert capfd.readouterr().out.strip() == hashes(tiny, "tiny")[-1]
