"""Examples of the guides, run as they stand. Commands: tests/distributed/test_pages.py."""

import json
import re
from pathlib import Path

import pytest

from titanlite.tools import cli

ROOT = Path(__file__).parents[2]


def blocks(guide: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / guide).read_text(), re.DOTALL)


EXAMPLE = ROOT / "examples" / "my_model"


def without_blank_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_the_guide_to_a_model_builds_the_example() -> None:
    built = without_blank_lines("".join(blocks("add_a_model.md", "python")))
    assert built == without_blank_lines((EXAMPLE / "gpt2.py").read_text())
    [toml] = blocks("add_a_model.md", "toml")
    settings = {line.split("#")[0].strip() for line in toml.splitlines()}
    assert settings <= {line.strip() for line in (EXAMPLE / "gpt2.toml").read_text().splitlines()}


@pytest.mark.nightly
def test_examples_of_own_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for source in blocks("extend.md", "python"):
        name = source.splitlines()[0].removeprefix("# ")
        assert len(without_blank_lines(source)) <= 21
        (tmp_path / name).write_text(source)
    config = "\n".join(blocks("extend.md", "toml")).replace("[training]", "[training]\nsteps = 4")
    assert config.count("[") >= 3
    (tmp_path / "own.toml").write_text(f"base = '{ROOT}/train_configs/debug.toml'\n{config}")
    options = "--training.seq_len=64 --training.global_batch_size=4 --metrics.log_freq=1 --data.num_workers=1"
    options += " --lr_scheduler.warmup_steps=2 --validation.enable=false --job.name=own"
    assert cli.run(["train", "own.toml", *options.split()]) == 0
    assert "100,000 sequences of its own" in capfd.readouterr().out
    records = [json.loads(line) for line in Path("outputs/own/metrics.jsonl").read_text().splitlines()]
    rows = Path("outputs/own/loss.csv").read_text().splitlines()
    assert [float(row.split(",")[1]) for row in rows] == pytest.approx([record["loss"] for record in records])
    assert len(rows) == 4
    first = records[0]
    assert 7 < first["loss"] < 8.5, "ln 2048 is 7.6: the plain cross entropy"
    assert 0 < abs(first["added_loss"]) < 1, "what smoothing adds"
