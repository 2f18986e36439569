"""examples/coordcheck.py: slopes of sizes that grow, vanish or stay, and what is refused."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.helpers import TinyRun, mentions

SCRIPT = Path(__file__).parents[3] / "examples" / "coordcheck.py"
SHAPE = ["dim=32", "n_layers=1", "n_heads=2", "n_kv_heads=2", "hidden_dim=96"]
OPTIONS = [*(f"--model.args.{name}" for name in SHAPE), "--optimizer.lr=0.02", "--training.global_batch_size=2"]
MUP = ["--optimizer.parametrization=mup", "--optimizer.base_width=32"]


def test_slopes_are_those_of_power_laws() -> None:
    growth_of = runpy.run_path(str(SCRIPT))["growth_of"]
    sizes = [(width, depth) for width in (64, 128, 256) for depth in (2, 4, 8)]
    laws = {
        "both": lambda width, depth: width**0.5 * depth**-1.0,
        "flat": lambda width, depth: 3 * width**0.2 * depth**-0.2,
        "less": lambda width, depth: width**-0.5,
        "logits": lambda width, depth: width**-0.5,
        "broken": lambda width, depth: float("inf"),
    }
    growths = growth_of({size: {name: [0.0, law(*size)] for name, law in laws.items()} for size in sizes})
    assert growths["both"].slopes == pytest.approx({"width": 0.5, "depth": -1.0})
    assert growths["flat"].slopes == pytest.approx({"width": 0.2, "depth": -0.2})
    words = {"both": "grows", "flat": "flat", "less": "vanishes", "logits": "flat", "broken": "grows"}
    assert {name: growth.words for name, growth in growths.items()} == words
    assert growth_of({(64, 2): {"a": [1.0]}, (64, 4): {"a": [2.0]}})["a"].slopes == pytest.approx({"depth": 1.0})


def check(monkeypatch: pytest.MonkeyPatch, *words: object) -> int | str | None:
    """Run the script, and return its exit code or its last words."""
    monkeypatch.setattr(sys, "argv", ["coordcheck.py", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return end.value.code


@pytest.mark.long
def test_the_standard_parametrization_grows_and_mup_is_flat(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--widths", 32, 64, 128, "--steps", 3)
    found = {}
    for name, options, code in (("standard", [], 1), ("mup", [*MUP, "--training.multi_token_weight=0.3"], 0)):
        assert check(monkeypatch, tiny.toml, *sizes, *OPTIONS, *options) == code
        output = capsys.readouterr().out
        rows = re.findall(r"^logits, change +(\d+) +(\d+)((?: +\S+)+)$", output, re.M)
        assert [(row[:2], len(row[2].split())) for row in rows] == [((str(width), "1"), 3) for width in (32, 64, 128)]
        lines = re.findall(r"^(.+): width\^(\S+): (\w+)$", output, re.M)
        found[name] = {quantity: (words, float(slope)) for quantity, slope, words in lines}
    for quantity in ("last block, change", "logits, change"):
        assert found["standard"][quantity][0] == "grows"
        assert found["standard"][quantity][1] > 0.5, quantity
    assert {words for words, _ in found["mup"].values()} == {"flat"}
    assert not (tiny.folder / "outputs" / "tiny").exists()


@pytest.mark.parametrize(("widths", "expected"), [([64], ["--widths"]), ([64, 40], [40, 16])])
def test_sizes_that_do_not_fit(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, widths: list[int], expected: list[object]
) -> None:
    assert mentions(str(check(monkeypatch, tiny.toml, "--widths", *widths, *OPTIONS)), *expected)
