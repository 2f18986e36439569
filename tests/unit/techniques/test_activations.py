"""What blocks keep for backward, in host memory. That layouts train as without it: tests/matrix.py."""

from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from tests.support.helpers import TinyRun, one_process, train_on_this_rank
from tests.support.layouts import built, one_step
from titanlite.techniques.activations.host import HostActivations
from titanlite.tools.plan.estimate import Layout, plan
from titanlite.tools.plan.hardware import find_hardware

HOST = "--activation_checkpoint.offload"
FOUR = "--model.args={dim=32,n_layers=4,n_heads=2,n_kv_heads=2,hidden_dim=64,vocab_size=260}"
CASES = {
    "nothing recomputed": [],
    "all recomputed": ["--activation_checkpoint.mode=full"],
    "every second block recomputed": [
        "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"
    ],
    "bfloat16": ["--training.mixed_precision_param=bfloat16 --training.local_batch_size=2"],
    "compiled": ["--compile.enable --activation_checkpoint.mode=selective --training.steps=2"],
    "dropout": ["--training.dropout=0.2"],
    "experts": ["--model.name=qwen3_moe --model.args.n_experts=4 --model.args.n_active_experts=2"],
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_no_bit_changes(tiny: TinyRun, case: str) -> None:
    words = " ".join([FOUR, *CASES[case]]).split()
    for name, option in {"device": "false", "host": "true"}.items():
        with one_process():
            train_on_this_rank(tiny.config(*words, f"{HOST}={option}", f"--job.name={name}"), 0, 1)
    assert tiny.losses("host") == tiny.losses("device")


class Watch:
    """Bytes of each copy, to the host and back."""

    def __init__(self) -> None:
        self.moved: list[int] = []

    def copied(self, right: Any) -> Any:
        def copy(kept: HostActivations, block: Any, target: Tensor, source: Tensor) -> None:
            self.moved.append(source.nbytes)
            right(kept, block, target, source)

        return copy


@pytest.mark.long
@pytest.mark.parametrize("mode", ["none", "full"])
def test_each_memory_moves_once_and_the_device_forgets_it(tiny: TinyRun, mode: str) -> None:
    """Four blocks: the first three move. When the last one begins, what the first two keep is gone from the device."""
    watch, gone = Watch(), list[bool]()
    with one_process(), patch.object(HostActivations, "_copy", watch.copied(HostActivations._copy)):
        run = built(0, 1, tiny.config(FOUR, HOST, f"--activation_checkpoint.mode={mode}"))
        kept = run.model.kept_on_host
        blocks: list[Any] = []
        run.model.layers[3].register_forward_pre_hook(
            lambda *_: gone.extend(not block.leaving for block in blocks)  # hooks run in the order of registration
        )
        for block in [*run.model.layers][:3]:
            block.register_forward_hook(lambda *_: blocks.append(kept._before))
        one_step(run)
        training = run.config.training
        token = training.batch_split(1)[0] * training.seq_len * 32 * 4
    assert gone == [True, True, False]
    there, back = watch.moved[: len(watch.moved) // 2], watch.moved[len(watch.moved) // 2 :]
    assert sorted(there) == sorted(back)
    if mode == "full":
        assert there == [token] * 3, "the input of each block"
    else:
        assert len(there) > 3 * 8
        assert sum(there) < sum(tiny_plan(tiny).values())


def tiny_plan(tiny: TinyRun) -> dict[str, int]:
    """Return the categories of memory of the peak without the option."""
    planned = plan(tiny.config(FOUR), Layout(1, find_hardware("cpu"), 1))
    return planned.breakdown


def test_validation_keeps_nothing(tiny: TinyRun) -> None:
    with one_process():
        run = built(0, 1, tiny.config(FOUR, HOST, "--validation.enable", f"--validation.path={tiny.text}"))
        with patch.object(HostActivations, "_copy") as copies:
            run.validator.run(run.model)
    assert not copies.called


@pytest.mark.long
@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_plan_has_its_bytes_and_the_time_that_nothing_hides(tiny: TinyRun, mode: str) -> None:
    """Twelve blocks of a GPU. The device keeps what about two blocks do, and the host what all but the last one do."""
    words = [
        "--model.args={dim=512,n_layers=12,n_heads=8,n_kv_heads=8,hidden_dim=1376,vocab_size=260}",
        "--training.seq_len=2048", "--training.global_batch_size=4", f"--activation_checkpoint.mode={mode}",
        "--training.mixed_precision_param=bfloat16",
    ]  # fmt: skip
    layout = Layout(1, find_hardware("H100"), 8)
    without, moved = (plan(tiny.config(*words, f"{HOST}={option}"), layout) for option in ("false", "true"))
    stay, leave = (found.phases["forward head"]["activations"] for found in (without, moved))
    each = 4 * 2048 * 512 * 2
    if mode == "full":
        assert moved.host == 11 * each
        assert stay - leave == pytest.approx(9 * each, abs=each)
    else:
        assert moved.host > 11 * 10 * each
        assert leave < 0.35 * stay
    assert moved.time.total >= without.time.total


def test_results_of_operations_that_autograd_does_not_keep_are_refused(tiny: TinyRun) -> None:
    from titanlite.config.checks import find_conflicts

    config = tiny.config(FOUR).model_copy(deep=True)
    words = {"mode": "selective", "offload": True}
    config = config.model_copy(update={"activation_checkpoint": config.activation_checkpoint.model_copy(update=words)})
    assert [key for key, _ in find_conflicts(config, None, ())] == ["activation_checkpoint.offload"]
