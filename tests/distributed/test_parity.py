"""`titanlite parity` on two processes."""

import json

import pytest

from tests.helpers import TinyRun
from titanlite.tools import cli
from titanlite.tools.report.parity import ONE


@pytest.mark.nightly
def test_the_command_trains_compares_and_exits_with_the_result(
    tiny: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["parity", "--config", str(tiny.toml), "--steps=4", "--processes", "2", "--only"]
    assert cli.run([*arguments, "DDP"]) == 0
    lines = capfd.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert [row[0] for row in cells[2:]] == [ONE, "DDP 2 x 1"]
    assert float(cells[3][4]) < 1e-5
    assert cells[3][6:] == ["within 1e-05", "yes"]
    curves = json.loads((tiny.folder / "outputs" / "tiny-parity" / "parity.json").read_text())
    assert [len(curve["losses"]) for curve in curves.values()] == [4, 4]
    assert curves[ONE]["losses"][0] == pytest.approx(5.5, abs=0.1)

    assert cli.run([*arguments, "DDP", "--tolerance=1e-12"]) == 1  # what no sum in another order can hold
    captured = capfd.readouterr()
    assert captured.err == "error: not equal: DDP 2 x 1\n"
    assert "| NO  |" in captured.out


DENSE = ["--model.args={dim=48, n_layers=2, n_heads=2, n_kv_heads=2, hidden_dim=70, vocab_size=260}"]
MOE = [
    "--model.name=qwen3_moe", "--model.flavor=debug",
    "--model.args={dim=32, n_layers=2, n_heads=2, n_kv_heads=2, vocab_size=260}",
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "processes", "layouts"),
    [
        (DENSE, 2, ["context 2 x FSDP 1", "tensor 2 x FSDP 1"]),
        (
            MOE, 4,
            [
                "context 2 x FSDP 2", "context 4 x FSDP 1", "expert 2 x FSDP 4", "expert 4 x FSDP 4",
                "tensor 2 x FSDP 2", "context 2 x tensor 2 x FSDP 1", "context 2 x expert 2 x FSDP 2",
                "expert 2 x tensor 2 x FSDP 2",
            ],
        ),
    ],
    ids=["dense", "MoE"],
)  # fmt: skip
def test_further_axes_alone_and_in_pairs(
    tiny: TinyRun, capfd: pytest.CaptureFixture[str], model: list[str], processes: int, layouts: list[str]
) -> None:
    options = [*model, "--optimizer.lr=3e-3", "--data.document_mask"]
    words = ["--steps=20", "--processes", str(processes), "--only", " x FSDP"]
    assert cli.run(["parity", "--config", str(tiny.toml), *words, *options]) == 0
    lines = capfd.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert [row[0] for row in cells[2:]] == [ONE, *layouts]
    for row in cells[3:]:
        assert float(row[4]) < 1e-5
        assert row[6:] == ["within 1e-05", "yes"]
