"""Updates on the host beside the next step: no bit differs, nothing is read too early, and errors end the run."""

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.support.helpers import THREE_BLOCKS, TinyRun, built, train_on_this_rank
from tests.support.models import plain_step
from tests.support.slow_updates import SlowUpdates
from tests.support.whole_runs import assert_equal, values_of
from titanlite.optim import build_optimizer
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.runtime.signals import StoppedBySignal, StopRequests
from titanlite.schema import Optimizer
from titanlite.state import TrainingState, state_of
from titanlite.techniques.offload import updates
from titanlite.train import Run, train

OFFLOAD = (THREE_BLOCKS, "--training.enable_cpu_offload", "--training.steps=4")
IN_BACKWARD = ("--optimizer.in_backward=true", "--training.max_norm=0")
BFLOAT16 = ("--optimizer.state_dtype=bfloat16", "--training.dtype=bfloat16")
SAVED = ("--checkpoint.interval=2", "--checkpoint.keep_latest_k=0")
MOE = (
    "--model={name='qwen3_moe', flavor='debug', args={dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, "
    "hidden_dim=24, vocab_size=259, n_experts=4, n_active_experts=2, balance_rate=0.1}}",
)

pytestmark = pytest.mark.usefixtures("single_process_group", "_free_folders")


@pytest.fixture
def _free_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that failed does not hold its folder."""
    monkeypatch.setattr("titanlite.run.run_folder._lock", lambda path: None)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[], SlowUpdates]:
    """Let updates run beside training from the call on."""
    return lambda: SlowUpdates(monkeypatch)


def trained(tiny: TinyRun, name: str, *options: str) -> Run:
    copies = f"--checkpoint.local_folder={tiny.folder / 'copies'}"
    return train_on_this_rank(tiny.config(f"--job.name={name}", copies, *OFFLOAD, *options), 0, 1)


def stored(tiny: TinyRun, name: str, step: int) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint."""
    import torch.distributed.checkpoint as dcp

    path = tiny.folder / "outputs" / name / "checkpoints" / f"step-{step:08d}"
    entries: Any = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return tensors


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "overlaps"),
    [
        pytest.param((), True, id="clipped where the norm is above 1"),
        pytest.param(("--training.max_norm=0.01",), True, id="clipped"),
        pytest.param(("--training.max_norm=0",), True, id="not clipped"),
        pytest.param(("--training.local_batch_size=2",), True, id="accumulation"),
        pytest.param(IN_BACKWARD, True, id="in backward"),
        pytest.param(BFLOAT16, True, id="bfloat16"),
        pytest.param((*IN_BACKWARD, *BFLOAT16, "--model.args.tied_head=true"), True, id="bfloat16 in backward, tied"),
        pytest.param(("--parallelism.fsdp_forward_prefetch=2",), True, id="gathered ahead"),
        pytest.param(("--lora.rank=4", "--lora.alpha=8"), True, id="LoRA"),
        pytest.param((*MOE, "--checkpoint.local_interval=1"), True, id="experts, local copies"),
        pytest.param(("--average.decay=0.5", *SAVED), False, id="average"),
        pytest.param(("--outer.every=2", *SAVED), True, id="outer optimizer"),
        pytest.param(("--metrics.layers.freq=2",), False, id="health of layers"),
        pytest.param(("--optimizer.name=Muon",), None, id="Muon"),
        pytest.param(("--compile.enable",), True, id="compiled", marks=pytest.mark.nightly),
    ],
)
def test_no_bit_differs(
    options: tuple[str, ...], overlaps: bool | None, tiny: TinyRun, slow: Callable[[], SlowUpdates]
) -> None:
    """overlaps: whether the next forward pass begins before the update ends; None: training updates by itself."""
    expected = values_of(trained(tiny, "alone", *options))
    seen = slow()
    found = values_of(trained(tiny, "beside", *options))
    assert_equal(found, expected)
    assert tiny.losses("beside") == tiny.losses("alone")
    if "metrics.layers" in str(options):
        beside, alone = (tiny.records(name, file="layers.jsonl") for name in ("beside", "alone"))
        assert [record["layers"] for record in beside] == [record["layers"] for record in alone]
    if SAVED[0] in options:
        assert_equal(stored(tiny, "beside", 2), stored(tiny, "alone", 2))
    assert (seen.threads == {"update_0"}) == (overlaps is not None)
    assert (seen.waits > 0) == bool(overlaps)


@pytest.mark.long
@pytest.mark.parametrize("options", [(), IN_BACKWARD, (*MOE, *IN_BACKWARD)], ids=["clipped", "in backward", "experts"])
def test_checkpoints_are_of_whole_steps(
    options: tuple[str, ...], tiny: TinyRun, slow: Callable[[], SlowUpdates]
) -> None:
    expected = values_of(trained(tiny, "alone", *SAVED, *options))
    slow()
    trained(tiny, "beside", *SAVED, *options, "--training.steps=3")
    assert_equal(stored(tiny, "beside", 2), stored(tiny, "alone", 2))
    assert_equal(values_of(trained(tiny, "beside", *SAVED, *options)), expected)
    assert tiny.losses("beside")[-1:] == tiny.losses("alone")[-1:]
    assert_equal(stored(tiny, "beside", 4), stored(tiny, "alone", 4))


class HalfUsed(nn.Module):
    """Two FSDP units, of which forward does not always use the second."""

    uses_last = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        fully_shard(self.first)
        fully_shard(self.last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return (self.last(x) if self.uses_last else x).square().mean()


@pytest.mark.long
def test_a_unit_that_forward_does_not_use_is_updated_once(
    slow: Callable[[], SlowUpdates], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its update may go on until backward begins, and its old gradient is no gradient of the next step."""
    slow()
    monkeypatch.setattr("tests.support.slow_updates.MORE", 0.1)
    found: list[list[Tensor]] = []
    for has_thread in (False, True):
        model = HalfUsed()
        optimizer = build_optimizer(model, Optimizer(lr=0.1), seed=0)
        step = plain_step(model, optimizer, updates=updates.HostUpdates(model, optimizer) if has_thread else None)
        for uses_last in (True, False, True):
            model.uses_last = uses_last
            loss = model(torch.ones(2, 4))
            step.before_backward(loss.detach())
            loss.backward()
            gradients = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
            assert len(gradients) == 2 + 2 * uses_last
            step.update(gradients, norm=torch.ones(()), skip=torch.tensor(False))
        step.finish_updates()
        found.append([local_tensor(parameter).detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [("--guard.nonfinite=skip",), (), IN_BACKWARD], ids=["skipped", "stopped", "in backward"]
)
def test_gradients_that_are_not_finite(
    options: tuple[str, ...], tiny: TinyRun, slow: Callable[[], SlowUpdates]
) -> None:
    """They are used no more than by updates that training makes: of step 2, below the last block."""

    def trained_until(name: str) -> tuple[dict[str, Tensor], str]:
        run = built(0, 1, tiny.config(f"--job.name={name}", *OFFLOAD, *options))

        def poison(gradient: Tensor) -> Tensor:
            return gradient * math.nan if run.setup.phase.position.step == 2 else gradient

        run.model.layers[1].register_forward_hook(lambda module, args, output: output.register_hook(poison) and None)
        ended = train(run)
        return values_of(run), str(ended)

    expected, reason = trained_until("alone")
    slow()
    found = trained_until("beside")
    assert_equal(found[0], expected)
    assert found[1] == reason
    assert ("None" in reason) == ("skip" in str(options))
    assert all(tensor.isfinite().all() for tensor in expected.values())


class AsksToStop(StopRequests):
    """A run that is asked to stop when the phase of a step begins."""

    def __init__(self, run: Run, step: int) -> None:
        super().__init__()
        self.run, self.step = run, step

    def requested(self) -> bool:
        return self.run.setup.phase.position.step >= self.step


@pytest.mark.long
def test_a_run_that_is_stopped_saves_a_whole_step(tiny: TinyRun, slow: Callable[[], SlowUpdates]) -> None:
    trained(tiny, "alone", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0")
    slow()
    run = built(0, 1, tiny.config("--job.name=beside", *OFFLOAD))
    stopped = train(run, AsksToStop(run, 2))
    assert isinstance(stopped, StoppedBySignal)
    assert stopped.taken == 2
    assert_equal(stored(tiny, "beside", 2), stored(tiny, "alone", 2))


class PresentOptions(dict[str, Any]):
    """Group of an optimizer whose options are those of another group at any time."""

    def __init__(self, parameters: Any, whole: dict[str, Any]) -> None:
        super().__init__(whole, params=parameters)
        self.whole = whole

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key) if key == "params" else self.whole[key]


def options_change(monkeypatch: pytest.MonkeyPatch) -> None:
    right = updates.part_of

    def part(optimizer: torch.optim.Optimizer, by_group: Any) -> torch.optim.Optimizer:
        made = right(optimizer, by_group)
        groups = zip(by_group, optimizer.param_groups, strict=True)
        made.param_groups = [PresentOptions(parameters, group) for parameters, group in groups]
        return made

    monkeypatch.setattr(updates, "part_of", part)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "FSDP does not wait": lambda patch: patch.setattr(updates, "before_gathering", lambda module, call: None),
    "the end of the run does not wait": lambda patch: patch.setattr(TrainingState, "finish", lambda self: None),
    "a checkpoint does not wait": lambda patch: patch.setattr(TrainingState, "tensors", state_at_once),
    "learning rates are not those of the step": options_change,
}


def state_at_once(self: TrainingState) -> Any:
    return state_of(self.model, self.optimizer)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_wait_is_found(
    fault: str, tiny: TinyRun, slow: Callable[[], SlowUpdates], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The updates are slow enough for these tests: values differ where one wait is left out."""
    expected = values_of(trained(tiny, "alone", *SAVED))
    slow()
    FAULTS[fault](monkeypatch)
    is_saved = "a checkpoint" in fault
    found = values_of(trained(tiny, "beside", *SAVED, f"--checkpoint.enable={str(is_saved).lower()}"))
    if is_saved:
        expected, found = stored(tiny, "alone", 2), stored(tiny, "beside", 2)
    assert not all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.long
@pytest.mark.parametrize("options", [(), IN_BACKWARD], ids=["clipped", "in backward"])
@pytest.mark.parametrize("bad", [3, 4])
def test_an_error_of_the_thread_ends_the_run(
    options: tuple[str, ...],
    bad: int,
    tiny: TinyRun,
    slow: Callable[[], SlowUpdates],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is raised as it is, in the step or in the next one. Nothing is saved from weights of no step, neither
    by the run nor because it is asked to stop."""
    slow()
    right, calls = updates.update, [0]
    run = built(0, 1, tiny.config("--job.name=beside", *OFFLOAD, *options, "--checkpoint.interval=2"))
    assert isinstance(run.state.updates, updates.HostUpdates)
    units = len(run.state.updates._units)

    def fail(optimizer: torch.optim.Optimizer, **options: Any) -> None:
        calls[0] += 1
        if calls[0] == units * (bad - 1) + 2:
            raise MemoryError("planted")
        right(optimizer, **options)

    monkeypatch.setattr(updates, "update", fail)
    with pytest.raises(MemoryError, match="planted"):
        train(run, AsksToStop(run, bad))
    assert {path.name for path in run.folder.checkpoints.glob("step-*")} <= {"step-00000002"}


def test_hooks_of_the_step_are_called_before_anything_changes(tiny: TinyRun, slow: Callable[[], SlowUpdates]) -> None:
    """By the thread of training: a save in the background waits there, also for tensors that others change."""
    slow()
    for options in ((), IN_BACKWARD):
        run = built(0, 1, tiny.config(f"--job.name=run-{len(options)}", *OFFLOAD, *options))
        assert run.state.updates is not None
        called: list[tuple[int, str, bool]] = []

        def remember(*_: Any, run: Run = run, called: Any = called) -> None:
            assert isinstance(run.state.updates, updates.HostUpdates)
            is_idle = all(future.done() for future in run.state.updates._updates.values())
            called.append((run.setup.phase.position.step, threading.current_thread().name, is_idle))

        run.optimizer.register_step_pre_hook(remember)
        train(run)
        assert called == [(step, "MainThread", True) for step in range(1, 5)]


@pytest.mark.long
@pytest.mark.parametrize(("options", "most"), [((), 5), (IN_BACKWARD, 2)], ids=["clipped", "in backward"])
def test_gradients_that_exist_at_once(
    options: tuple[str, ...],
    most: int,
    tiny: TinyRun,
    slow: Callable[[], SlowUpdates],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of one step, or in backward of the unit that is updated and the next one."""
    slow()
    start, found = updates.HostUpdates._start, list[int]()

    def counted(of: updates.HostUpdates, *arguments: Any) -> None:
        units = ([p for of_group in by_group for p in of_group] for by_group in of._units.values())
        found.append(sum(any(parameter.grad is not None for parameter in unit) for unit in units))
        start(of, *arguments)

    monkeypatch.setattr(updates.HostUpdates, "_start", counted)
    trained(tiny, "run", *options, "--checkpoint.enable=false")
    assert max(found) <= most


def test_who_updates(tiny: TinyRun, slow: Callable[[], SlowUpdates]) -> None:
    """On a CPU training itself; beside a GPU a thread, where AdamW alone updates and no file is mapped."""

    def has_thread(*options: str) -> bool:
        run = built(0, 1, tiny.config("--checkpoint.enable=false", *OFFLOAD, *options))
        return run.state.updates is not None

    assert not has_thread()
    slow()
    assert has_thread()
    assert has_thread(*BFLOAT16)
    assert not has_thread("--training.enable_cpu_offload=false")
    assert not has_thread("--optimizer.name=SGD")
    assert not has_thread("--offload.optimizer=disk")
    assert not has_thread("--debug.reproducible_layouts=true", "--training.local_batch_size=8")
