"""Which runs have FSDP units, and that a process alone has the same bits without."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.matrix import EVEN, FLOAT8, GATHERED
from tests.support.helpers import TinyRun, one_process, train_on_this_rank
from tests.support.layouts import whole
from tests.support.whole_runs import assert_equal
from titanlite.state import flat

SAVES = "--checkpoint.interval=3"
CASES = {
    "accumulation": ["--training.local_batch_size=2"],
    "recomputed": ["--activation_checkpoint.mode=full"],
    "tied head, two predicted tokens": ["--model.args.tied_head=true", "--training.multi_token_weight=0.3"],
    "LoRA": ["--lora.rank=3"],
    "average": ["--average.decay=0.75"],
    "float8": f"{EVEN} {FLOAT8} {GATHERED}".split(),
    "bfloat16 weights": [
        "--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16",
        "--training.mixed_precision_reduce=bfloat16",
    ],
}  # fmt: skip


def trained(tiny: TinyRun, name: str, words: list[str], steps: int = 6) -> tuple[bool, dict[str, torch.Tensor]]:
    """Return whether a run has FSDP units, and its state at the end."""
    config = tiny.config(*words, SAVES, f"--job.name={name}", f"--training.steps={steps}")
    with one_process():
        run = train_on_this_rank(config, 0, 1)
        return isinstance(run.model, FSDPModule), {
            key: whole(x) for key, x in flat(run.checkpoints.state.tensors()).items()
        }


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_process_alone_has_the_same_bits_without_units(
    tiny: TinyRun, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of the steps resumes from a checkpoint that was saved with units."""
    has_units, without = trained(tiny, "without", CASES[case])
    assert not has_units
    with monkeypatch.context() as patch:
        patch.setattr("titanlite.parallelize.fsdp.has_units", lambda *_, **__: True)
        assert trained(tiny, "with", CASES[case], steps=3)[0]
    _, resumed = trained(tiny, "with", CASES[case])
    assert_equal(resumed, without)
    assert tiny.losses("with") == tiny.losses("without")


@pytest.mark.parametrize(
    "words",
    [
        "--training.mixed_precision_param=bfloat16",
        "--training.dtype=bfloat16",
        "--training.enable_cpu_offload",
        "--debug.reproducible_layouts --training.local_batch_size=1",
        "--optimizer.in_backward --training.max_norm=0",
    ],
)
def test_what_converts_moves_or_adds_has_units(tiny: TinyRun, words: str) -> None:
    assert trained(tiny, "tiny", words.split(), steps=1)[0]
