"""What no machine at hand can measure is at least a config that titanlite takes."""

import sys
from pathlib import Path

import pytest

from titanlite.config.load import load

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu

    yield gpu
    for name in ("gpu", "record"):
        sys.modules.pop(name, None)


def test_every_case_of_the_gpu_benchmark_is_a_config(gpu: object) -> None:
    cases = gpu.cases()  # pyright: ignore[reportAttributeAccessIssue]
    titles = [case.title for case in cases]
    assert len(set(titles)) == len(titles) >= 30
    for case in cases:
        config = load(ROOT / "train_configs" / "llama3_8b.toml", case.words, world_size=1)
        assert config.model.flavor == case.flavor
        assert config.training.global_batch_size == case.batch
