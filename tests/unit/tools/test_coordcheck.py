"""`titanlite coordcheck`: the verdict on sizes that grow, vanish or stay, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import TinyRun, mentions
from titanlite.runtime.errors import RunError, UserError
from titanlite.tools import cli
from titanlite.tools.coordcheck import coordcheck, judge

SHAPE = ["dim=32", "n_layers=1", "n_heads=2", "n_kv_heads=2", "hidden_dim=96"]
OPTIONS = [*(f"--model.args.{name}" for name in SHAPE), "--optimizer.lr=0.02", "--training.global_batch_size=2"]
MUP = ["--optimizer.parametrization=mup", "--optimizer.base_width=32"]


def test_slopes_are_those_of_power_laws() -> None:
    sizes = [(width, depth) for width in (64, 128, 256) for depth in (2, 4, 8)]
    laws = {
        "both": lambda width, depth: width**0.5 * depth**-1.0,
        "flat": lambda width, depth: 3 * width**0.2 * depth**-0.2,
        "less": lambda width, depth: width**-0.5,
        "logits": lambda width, depth: width**-0.5,
        "broken": lambda width, depth: float("inf"),
    }
    found = {size: {name: [0.0, law(*size)] for name, law in laws.items()} for size in sizes}
    verdicts = {verdict.quantity: verdict for verdict in judge(found)}
    assert verdicts["both"].slopes == pytest.approx({"width": 0.5, "depth": -1.0})
    assert verdicts["flat"].slopes == pytest.approx({"width": 0.2, "depth": -0.2})
    words = {"both": "grows", "flat": "flat", "less": "vanishes", "logits": "flat", "broken": "grows"}
    assert {name: verdict.words for name, verdict in verdicts.items()} == words
    assert judge({(64, 2): {"a": [1.0]}, (64, 4): {"a": [2.0]}})[0].slopes == pytest.approx({"depth": 1.0})


@pytest.mark.long
def test_the_standard_parametrization_grows_and_mup_is_flat(tiny: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    def check(*options: str, out: Path | None = None) -> None:
        coordcheck(str(tiny.toml), [*OPTIONS, *options], widths=[32, 64, 128], steps=3, out=out)

    with pytest.raises(RunError) as error:
        check()
    assert mentions(str(error.value), "last block", "logits")
    check(*MUP, "--training.multi_token_weight=0.3", out=tiny.folder / "check.html")
    output = capsys.readouterr().out.splitlines()
    rows = [line.removeprefix("logits, change").split() for line in output if line.startswith("logits, change  ")]
    assert [row[:2] for row in rows] == [["32", "1"], ["64", "1"], ["128", "1"]] * 2
    assert {len(row) for row in rows} == {5}, "there is no change at step 0"
    charts = chart_data((tiny.folder / "check.html").read_text())
    drawn = next(chart for chart in charts if chart["name"] == "last block, change width")
    assert [trace["x"] for trace in drawn["traces"]] == [[32, 64, 128]] * 3
    last = [line.split()[-1] for line in output if line.startswith("last block, change  ")]
    assert [f"{value:.3g}" for value in drawn["traces"][-1]["y"]] == last[3:]
    found = [match.groups() for line in output if (match := re.fullmatch(r"(.+): width\^([+-].+): (\w+)", line))]
    half = len(found) // 2
    verdicts = {
        name: {quantity: (words, float(slope)) for quantity, slope, words in part}
        for name, part in (("standard", found[:half]), ("mup", found[half:]))
    }
    for quantity in ("last block, change", "logits, change"):
        assert verdicts["standard"][quantity][0] == "grows"
        assert verdicts["standard"][quantity][1] > 0.5, quantity
    assert {words for words, _ in verdicts["mup"].values()} == {"flat"}
    assert not (tiny.folder / "outputs" / "tiny").exists()


def chart_data(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])["charts"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--widths", "64"], ["--widths"]),
        (["--widths", "64", "40"], [40, 16]),
        (["--widths", "64", "0"], ["--widths", 0]),
        ([], ["--widths"]),
    ],
)
def test_sizes_that_do_not_fit(
    tiny: TinyRun, capsys: pytest.CaptureFixture[str], words: list[str], expected: list[object]
) -> None:
    assert cli.run(["coordcheck", str(tiny.toml), *OPTIONS, *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert mentions(line, *expected)


def test_a_config_must_be_named() -> None:
    with pytest.raises(UserError):
        coordcheck(widths=[32, 64])
