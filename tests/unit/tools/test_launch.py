"""Options of run_train.sh's launcher for torchrun, and an environment that is not right."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.helpers import mentions
from titanlite.runtime.errors import UserError
from titanlite.runtime.process_group import process_group, read_ranks
from titanlite.tools.launch import address_options, interface_of, use_interface_of

LOOPBACK = dict(socket.if_nameindex())[1]


def test_without_an_address_torchrun_finds_its_own() -> None:
    assert address_options("node0:29500", {}) == []
    assert address_options("node0:29500", {"LOCAL_ADDR": "", "RDZV_CONF": ""}) == []
    assert address_options("node0:29500", {"RDZV_CONF": "join_timeout=60"}) == ["--rdzv-conf=join_timeout=60"]


def test_the_machine_of_the_endpoint_hosts_the_rendezvous() -> None:
    first, second = {"LOCAL_ADDR": "10.0.0.1", "RDZV_CONF": "join_timeout=60"}, {"LOCAL_ADDR": "10.0.0.2"}
    assert address_options("10.0.0.1:29500", first) == [
        "--local-addr=10.0.0.1",
        "--rdzv-conf=join_timeout=60,is_host=1",
    ]
    assert address_options("10.0.0.1:29500", second) == ["--local-addr=10.0.0.2", "--rdzv-conf=is_host=0"]


def test_gloo_uses_the_interface_of_the_address() -> None:
    assert interface_of("127.0.0.1") == LOOPBACK
    assert interface_of("192.0.2.1") is None  # of documentation, RFC 5737
    environ = {"LOCAL_ADDR": "127.0.0.1"}
    use_interface_of(environ)
    assert environ["GLOO_SOCKET_IFNAME"] == LOOPBACK
    for chosen in ({"LOCAL_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "eth7"}, {"LOCAL_ADDR": "192.0.2.1"}, {}):
        environ = dict(chosen)
        use_interface_of(environ)
        assert environ == chosen


def run(
    words: list[str], folder: Path, *, files: int | None = None, environ: dict[str, str] | None = None
) -> tuple[int, list[str]]:
    """Run a command in a folder, and return its exit code and the lines of its errors."""
    limit = (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    everything = {**os.environ, "PATH": path, **(environ or {})}
    result = subprocess.run(
        words, cwd=folder, env=everything, capture_output=True, text=True, check=False, preexec_fn=limit
    )
    return result.returncode, result.stderr.splitlines()


SCRIPT = str(Path("run_train.sh").absolute())
MODULE = [sys.executable, "-m"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("MAX_RESTARTS", "08", "no_such_config"),  # a decimal number
        ("MAX_RESTARTS", "0x8", "MAX_RESTARTS"),
        ("MAX_RESTARTS", "-1", "MAX_RESTARTS"),
        ("MAX_RESTARTS", "9" * 30, "MAX_RESTARTS"),
        ("NPROC", "08", "NPROC"),
        ("NPROC", "9" * 30, "NPROC"),
        ("NNODES", "1:09", "NNODES"),
        ("NNODES", f"1:{'9' * 30}", "NNODES"),
    ],
)
def test_numbers_of_the_environment_are_decimal(name: str, value: str, named: str, tmp_path: Path) -> None:
    code, lines = run([SCRIPT, "--config", "no_such_config"], tmp_path, environ={name: value})
    assert (code, len(lines)) == (2, 1)
    assert mentions(lines[0], "error: " + named if named.isupper() else named)


@pytest.mark.long
@pytest.mark.parametrize("tasks", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_several_scripts_that_would_each_be_a_run_are_refused(tasks: str, tmp_path: Path) -> None:
    """scripts/slurm.sh sets NNODES; one process for each task is a rank of its own."""
    for environ, named in (
        ({"NPROC": "2"}, ["2 of these scripts", "scripts/slurm.sh", "NNODES"]),
        ({"NPROC": "1"}, ["no_such_config"]),
        ({"NPROC": "2", "NNODES": "1"}, ["no_such_config"]),
    ):
        code, lines = run([SCRIPT, "--config", "no_such_config"], tmp_path, environ={tasks: "2"} | environ)
        assert (code, len(lines)) == (2, 1)
        assert mentions(lines[0], *named)


@pytest.mark.long
@pytest.mark.parametrize("words", ["titanlite train", "titanlite.tools.launch 1 2 x:0 0"])
@pytest.mark.parametrize("files", [6, 12])
def test_a_process_that_may_open_few_files_is_refused(words: str, files: int, tmp_path: Path) -> None:
    code, lines = run([*MODULE, *words.split()], tmp_path, files=files)
    assert (code, len(lines)) == (2, 1)
    assert mentions(lines[0], files, "ulimit -n")


@pytest.mark.long
def test_absolute_paths_work_where_the_current_folder_was_deleted(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("")
    folder = tmp_path / "gone"
    deleting = f"import os, sys; os.rmdir({str(folder)!r}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    for words, expected in (
        (["config", "show", config], 0),
        (["config", "show", "run.toml"], 2),
        (["check", config, "--model.name=llama3", "--job.dump_folder=outputs"], 2),
        (["check", config, "--model.name=llama3", f"--job.dump_folder={tmp_path}"], 0),
    ):
        folder.mkdir()
        code, lines = run([sys.executable, "-c", deleting, "-m", "titanlite", *map(str, words)], folder)
        assert code == expected, lines
        assert sum(line.startswith("error: ") for line in lines) == (expected == 2)
        assert "Traceback" not in "".join(lines)


# Variables of torchrun


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR", "MASTER_PORT"]),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, ["MASTER_PORT"]),
        ({"WORLD_SIZE": "2"}, ["RANK"]),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, ["RANK", "2"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, ["MASTER_PORT", "'x'"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "70000"}, ["70000"]),
    ],
)
def test_half_of_a_job_is_one_line(environ: dict[str, str], named: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught, process_group(read_ranks(os.environ), torch.device("cpu")):
        pass
    assert "\n" not in str(caught.value)
    assert mentions(str(caught.value), *named)


def test_a_port_in_use_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = str(other.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError) as caught, process_group(read_ranks(os.environ), torch.device("cpu")):
            pass
    assert "\n" not in str(caught.value)
    assert mentions(str(caught.value), port, "MASTER_PORT")
