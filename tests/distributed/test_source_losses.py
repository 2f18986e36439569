"""Training loss by source is that of the whole global batch, on every layout."""

import pytest

from tests.helpers import TinyRun, run_in_turn, train_on_two_sources
from tests.layouts import degrees, trained

DENSE = ["--model.args={n_heads=4,n_kv_heads=2,dim=32}"]
MOE = ["--model={name='qwen3_moe', flavor='debug', args={dim=32, n_layers=2, vocab_size=259}}"]
LAYOUTS = {
    "one": (1, degrees(1, 1)),
    "accumulated": (1, [*degrees(1, 1), "--training.local_batch_size=2"]),
    "sharded": (2, degrees(1, 2)),
    "context": (2, degrees(1, 1, 2)),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "further"),
    [
        pytest.param(DENSE, {"tensor": (2, degrees(1, 1, 1, 2)), "hsdp": (4, degrees(2, 2))}, id="dense"),
        pytest.param(MOE, {"expert": (2, degrees(1, 2, 1, 1, 2))}, id="MoE"),
    ],
)
def test_values_do_not_depend_on_the_layout(
    tiny: TinyRun, model: list[str], further: dict[str, tuple[int, list[str]]]
) -> None:
    train_on_two_sources(tiny)
    options, layouts = ["--metrics.log_freq=2", *model], LAYOUTS | further
    for name, (ranks, layout) in layouts.items():
        run_in_turn(trained, ranks, [tiny.config(*options, *layout, f"--job.name={name}", world_size=ranks)])
    expected = [record["source_losses"] for record in tiny.records("one")]
    assert len(expected) > 2
    assert all(set(losses) == {"digits", "words"} for losses in expected)
    for name in layouts:
        for found, wanted in zip(tiny.records(name), expected, strict=True):
            assert found["source_losses"] == pytest.approx(wanted, rel=1e-5), name
