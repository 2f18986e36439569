"""Fixtures that many tests share."""

import gc
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.helpers import TinyRun, one_process


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Use one thread: tests run in parallel, and sums in one thread are the same each time. Choose the library of
    matmuls, as a run would, so that no test depends on those before it.

    Commands that a test calls in this process, and processes that it starts, leave it so because of the variable.
    """
    import torch  # here and below: the process that starts the workers runs no test, and needs no torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

    from titanlite.ops.cpu import multiply_by_onednn

    multiply_by_onednn()


LOGGER = logging.getLogger("titanlite")
AT_FIRST = LOGGER.level, LOGGER.propagate, [*LOGGER.handlers]


def reset_logger() -> None:
    level, LOGGER.propagate, handlers = AT_FIRST
    LOGGER.handlers = [*handlers]
    LOGGER.setLevel(level)


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    """Restore the logger, which a run in this process sets up for itself: in a test, or in the fixture of a module."""
    reset_logger()
    yield
    reset_logger()


Lines = Callable[[], list[str]]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Lines:
    """List the warnings and errors that titanlite has logged so far."""
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("titanlite")
    ]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Lines:
    """List all that titanlite has logged so far, from the level of information on."""
    caplog.set_level(logging.INFO, "titanlite")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("titanlite")]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that ends with exit code 2 and one line on standard error, and return the line."""
    from titanlite.tools import cli

    def run(*words: object) -> str:
        capfd.readouterr()
        assert cli.run([*map(str, words)]) == 2
        [line] = capfd.readouterr().err.splitlines()
        return line

    return run


@pytest.fixture(autouse=True)
def _quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.quick_start import start_quickly

    start_quickly(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def _forget_own_code(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget modules of a test's own, as the next process would: other tests have files of the same names."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before, folder = {*sys.modules}, str(tmp_path_factory.getbasetemp())
    yield
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """Start one fork server for all processes of this session: ranks, and workers of data loaders."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.support.preload"])
    multiprocessing.forkserver.ensure_running()


@pytest.fixture
def tiny(tmp_path: Path) -> TinyRun:
    """A run that takes a second: tiny model, tiny text."""
    return TinyRun(tmp_path)


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of an empty bucket."""
    from tests.support.object_stores import moto_server

    with moto_server() as url:
        yield url


@pytest.fixture
def single_process_group() -> Iterator[None]:
    """A process group of one rank, like that of training on one process."""
    with one_process():
        yield


@pytest.fixture
def own_process_group() -> Iterator[None]:
    """Process group of a command in this process. After an error the command leaves it, as the process would end."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()


@pytest.hookimpl(trylast=True)  # after those that the command line leaves out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let each worker begin with its share of the longest tests: else the others wait for them at the end.

    Workers get consecutive parts of the list, and later take tests from the end of another's.
    """
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    slow = [item for item in items if item.get_closest_marker("slow")]  # keywords have names of folders, too
    others = [item for item in items if not item.get_closest_marker("slow")]
    size = -(-len(others) // workers)
    items[:] = [item for n in range(workers) for item in (*slow[n::workers], *others[n * size : (n + 1) * size])]
    if (on_gpu := [item for item in items if item.get_closest_marker("gpu")]) and not has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_finish() -> None:
    """Leave what imports made out of collections: to walk through it takes seconds of CPU time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Collect what tests left once, and hide the rest: pytest and the interpreter would walk through it for seconds."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of tests by folder, next to the longest ones (--durations)."""
    if terminalreporter.config.option.durations is None:
        return
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds["/".join(report.nodeid.partition("::")[0].split("/")[:3])] += report.duration
    terminalreporter.section("seconds by folder, or file")
    for folder, spent in sorted(seconds.items(), key=lambda item: -item[1])[:20]:
        terminalreporter.line(f"{spent:7.1f} {folder}")
    terminalreporter.line(f"{sum(seconds.values()):7.1f} all")
