"""The plan against this machine's GPU. Skipped without one."""

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["1B, 4096 tokens x 4, selective", "1B, 4096 tokens x 4, full, compiled"])
def test_predicted_memory_and_time_are_near(name: str) -> None:
    """Memory within 10 %, time within 25 %; `benchmarks/plan_accuracy.py gpu` has more cases."""
    import torch

    from benchmarks.plan_accuracy import GPU_CASES, LLAMA_8B, planned, trained
    from titanlite.config.load import load
    from titanlite.runtime.hardware import hardware_of

    device = torch.device("cuda", 0)
    hardware = hardware_of(device)
    if hardware is None or hardware.memory < 70 * 2**30:
        pytest.skip("needs a GPU of the table with 80 GB")
    overrides = dict(GPU_CASES)[name]
    config = load(LLAMA_8B, [*overrides, "--data.tokenizer=bytes"], world_size=1)
    predicted = planned(config, 1, hardware, 1)
    peak, seconds = trained(config, device)
    assert predicted.peak == pytest.approx(peak, rel=0.1)
    assert predicted.time.total == pytest.approx(seconds, rel=0.25)
