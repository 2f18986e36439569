"""The plan against this machine's GPU. Skipped without one."""

import statistics

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["compiled, selective AC", "compiled, full AC"])
def test_predicted_memory_and_time_are_near(name: str) -> None:
    """Memory within 10 %, time within 25 %; `benchmarks/plan_accuracy.py gpu` has more cases."""
    import torch

    from benchmarks.gpu import ROOT, cases, measure
    from benchmarks.plan_accuracy import planned
    from titanlite.config.load import load
    from titanlite.runtime.hardware import hardware_of

    hardware = hardware_of(torch.device("cuda", 0))
    if hardware is None or hardware.memory < 70 * 2**30:
        pytest.skip("needs a GPU of the table with 80 GB")
    [case] = [case for case in cases() if case.title == f"1B, 4 x 4096: {name}"]
    config = load(ROOT / "train_configs" / f"{case.config}.toml", case.words, world_size=1)
    predicted = planned(config, 1, hardware, 1)
    found = measure(case)
    seconds = case.batch * case.seq_len / statistics.median(found["tokens_per_second"])
    assert predicted.reserved / 2**30 == pytest.approx(found["memory_gib"], rel=0.1)
    assert predicted.time.total == pytest.approx(seconds, rel=0.25)
