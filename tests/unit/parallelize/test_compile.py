"""The compiler: the folder of compiled code, the time of compiling, and its end after the first steps."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from tests.support.helpers import TinyRun, mentions, train_on_this_rank
from tests.support.layouts import trace_blocks
from tests.support.recorders import recorder, records, result_of
from titanlite.metrics.recorder import CompileWatch
from titanlite.models.decoder import Block
from titanlite.models.llama3 import Llama3Args
from titanlite.observer import CurrentPhase, Phase
from titanlite.parallelize.compile import use_cache
from titanlite.schema import Compile

PLACE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def dynamo() -> Iterator[None]:
    """The compiler with nothing compiled yet."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_where_compiled_code_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def chosen(config: Compile, *, before: str | None = None) -> str | None:
        monkeypatch.delenv(PLACE, raising=False)
        if before:
            monkeypatch.setenv(PLACE, before)
        use_cache(config)
        return os.environ.get(PLACE)

    on = Compile(enable=True)
    assert chosen(Compile()) is None
    assert chosen(on) == str(tmp_path / ".cache" / "titanlite" / "compile")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert chosen(on) == str(tmp_path / "xdg" / "titanlite" / "compile")
    assert chosen(on, before="/elsewhere") == "/elsewhere"
    assert warnings() == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert chosen(on) is None
    [warning] = warnings()
    assert mentions(warning, "compile.enable", "TORCHINDUCTOR_CACHE_DIR")


@pytest.mark.usefixtures("single_process_group")
def test_compiling_is_no_step_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, compiling = [100.0], [7.0]
    monkeypatch.setattr("titanlite.metrics.recorder.compile_seconds", lambda: compiling[0])
    lines: list[str] = []
    monkeypatch.setattr("titanlite.metrics.recorder.logger.info", lambda line, **options: lines.append(line))
    phase = CurrentPhase(clock=lambda: now[0])
    metrics = recorder(tmp_path, log_freq=1, phase=phase)

    def takes(seconds: float, of_compiler: float = 0.0) -> None:
        now[0] += seconds + of_compiler
        compiling[0] += of_compiler

    for step, of_compiler in ((1, 40.0), (2, 0.0), (3, 0.0)):
        phase.begin_step(step)
        takes(2.0, of_compiler)
        metrics.end_step(step, result_of(3.5, 0.25), lr=0.1, samples=8 * step, shares=dict, last=False)
        with metrics.not_training(waits_for_device=False):
            phase.enter(Phase.VALIDATION)
            takes(10.0, 20.0)
    assert [record["step_seconds"] for record in records(tmp_path)] == pytest.approx([2.0, 2.0, 2.0])
    assert [record["tokens_per_second"] for record in records(tmp_path)] == pytest.approx([500, 500, 500])
    assert [record.get("compile_seconds") for record in records(tmp_path)] == [40.0, None, None]
    assert ["compile 40.0 s" in line for line in lines] == [True, False, False]


@pytest.mark.long
@pytest.mark.usefixtures("dynamo")
def test_recompilations_are_counted() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    watch = CompileWatch()

    def step(size: int) -> int:
        compiled(torch.ones(size))
        watch.end_step()
        return watch.recompiles

    assert [step(2), step(3)] == [0, 0]
    assert watch.take_seconds() > 0
    assert step(3) == 0
    assert watch.take_seconds() == 0
    with watch.outside_steps():
        compiled(torch.ones(4))  # the first validation
    assert step(2) == 0
    assert watch.take_seconds() == 0
    assert [step(5), step(5)] == [1, 1]
    with watch.outside_steps():
        compiled(torch.ones(6))  # a later one should find all compiled
    assert step(5) == 2


@pytest.mark.usefixtures("single_process_group", "dynamo")
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("selective", marks=pytest.mark.slow),
        *(pytest.param(mode, marks=pytest.mark.nightly) for mode in ("none", "full")),
    ],
)
def test_nothing_is_compiled_after_the_first_step(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Documents of other lengths in each batch, several micro-batches, and validation, which compiles once for itself:
    it has no backward. The blocks are traced as always, and not turned into machine code."""
    monkeypatch.setattr("titanlite.parallelize.compile_blocks", trace_blocks)
    graphs: list[int] = []
    original = CompileWatch.end_step

    def end_step(self: CompileWatch) -> None:
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        original(self)

    monkeypatch.setattr(CompileWatch, "end_step", end_step)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    options = ["--compile.enable", f"--activation_checkpoint.mode={mode}", "--data.document_mask"]
    options += ["--training.local_batch_size=2", "--checkpoint.interval=2"]
    options += ["--validation.enable", f"--validation.path={tiny.text}", "--validation.freq=2"]
    train_on_this_rank(tiny.config(*options), 0, 1)
    assert [count - before for count in graphs] == [1, 1, 2, 2, 2, 2]
    assert ["compile_seconds" in record for record in tiny.records()] == [True, *[False] * 5]
    assert not any("recompiles" in record for record in tiny.records())


@pytest.mark.usefixtures("dynamo")
def test_a_block_that_is_cut_at_its_experts_has_three_graphs() -> None:
    """One to the norm before the experts, fused with the sum before it; that of the experts; one of the sum behind."""

    class Attention(nn.Module):
        def forward(self, x: Tensor, *_: Any) -> Tensor:
            return 3 * x

    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return 2 * x

    counter, x, nothing = CompileCounter(), torch.randn(1, 4, 16), torch.zeros(())
    args = Llama3Args(dim=16, n_layers=1, n_heads=2, n_kv_heads=2, hidden_dim=32, vocab_size=8, max_seq_len=4)
    block = Block(args, attention=Attention(), feed_forward=Cut())
    found = torch.compile(block, backend=counter)(x, nothing, nothing)
    torch.testing.assert_close(found, block(x, nothing, nothing))
    assert counter.frame_count == 3
