"""Start the processes of one machine with torchrun, and end as they end: what run_train.sh runs for several processes.

torchrun turns every exit code of its workers into 1 and prints tracebacks of its own. Here the first worker that ends
leaves its exit code beside torchrun's error files, and torchrun's exceptions become one line. A first signal goes to
every worker, which saves and ends; this process waits for them. With MAX_RESTARTS, torchrun starts the workers again
after a failure. The check of the config and the workers are forks of a server (`fork_server`), so that this process
alone imports PyTorch.
"""

import fcntl
import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from titanlite.config.shipped import find_config
from titanlite.run.endings import FAILED, read_end, report_errors
from titanlite.runtime.allocator import cores, importing, use_expandable_segments
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import check_open_files, leave_deleted_folder
from titanlite.runtime.output import open_closed_streams, queued_output
from titanlite.runtime.signals import STOP_SIGNALS, STOPPED, StopRequests, describe_end
from titanlite.tools import cli
from titanlite.tools.fork_server import CannotFork, ForkedProcess, ForkServer, Handlers, fork_worker_server

if TYPE_CHECKING:
    from titanlite.schema import Config

SHUTDOWN_SECONDS = 3600
"""Time that workers have to save a checkpoint after a signal, until torchrun kills them."""
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable of torchrun for that time; its default is 30 s."""
GRACE_SECONDS = 10
"""Time that workers have to end after a second SIGINT, until they are killed: a stopped one (SIGSTOP) never ends."""
DOCUMENTATION = "192.0.2.1"
"""An address that no machine has (RFC 5737), and that the default route leads to."""
PYTHON = [sys.executable, "-u", "-m", "titanlite"]
IMPORTED = (
    "torch._dynamo",
    "titanlite.run.versions",
    "titanlite.run.watchdog",
    "titanlite.runtime.console",
    "titanlite.runtime.private_torch.elastic",
    "titanlite.tools.assemble",
    "titanlite.tools.checkpoints.last_export",
)
"""Modules that every rank imports. PyTorch imports the first when it builds a module on the meta device."""
LOG_VARIABLE = "TORCH_CPP_LOG_LEVEL"
"""Environment variable that PyTorch reads when it is imported."""
SIOCGIFADDR = 0x8915
"""Request to Linux for the IPv4 address of a network interface."""


Process = ForkedProcess | subprocess.Popen[bytes]


class Start(Protocol):
    """Starts a process of the command: the words of the command, and the whole environment."""

    def __call__(self, command: Sequence[str], environ: Mapping[str, str], *, new_session: bool = True) -> Process: ...


class _Requests(StopRequests):
    """Signals to this process. Before there are workers it ends at once; then torchrun passes signals on to them."""

    def is_training(self) -> bool:
        return bool(_workers())


def main() -> NoReturn:
    """Check the config, run torchrun, and end with the exit code of the workers.

    Words of the command line: number of machines or its range, processes on each, host:port of the first, restarts
    after failures, arguments of training.
    """
    open_closed_streams()
    leave_deleted_folder()
    if code := report_errors(check_open_files):
        sys.exit(code)
    nodes, processes, endpoint, restarts, *words = sys.argv[1:]
    command = ["train"]
    if words[:1] == ["check"]:  # of the machines
        command, words, restarts = ["check", "--machines"], words[1:], "0"
    smallest = int(nodes.partition(":")[0]) * int(processes)
    sizes = {"WORLD_SIZE": str(smallest), "LOCAL_WORLD_SIZE": processes}
    check = ["check", "--here", *words]
    requests, folder = _Requests(), Path(tempfile.mkdtemp(prefix="titanlite-"))
    end_now = partial(_end_now, folder)
    handlers = {number: signal.getsignal(number) or signal.SIG_DFL for number in (*STOP_SIGNALS, signal.SIGQUIT)}
    for number in STOP_SIGNALS:  # without the thread of `listening`, which a fork would not have
        if handlers[number] != signal.SIG_IGN:
            signal.signal(number, lambda number, _: requests.receive(signal.Signals(number), end_now, lambda: False))
    try:
        config = _read([command[0], *words], smallest)
        if config is None:  # the mistakes are reported at once, not after PyTorch is imported
            shutil.rmtree(folder)
            os.environ.update(sizes)
            sys.argv[1:] = check
            cli.main()
        _set_environment(int(processes))
        use_interface_of(os.environ, endpoint if int(nodes.rpartition(":")[2]) > 1 else None)
        start = _import_and_fork(config, handlers)
        with requests.listening(end_now, lambda: False), queued_output():
            # all mistakes are reported once, not by every process
            code = start([*PYTHON, *check], {**os.environ, **sizes}, new_session=False).wait()
            code = code or _launch(nodes, processes, endpoint, restarts, [*command, *words], folder, start)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


def _read(words: Sequence[str], world_size: int) -> "Config | None":
    """Return the config of a command; None if one of them has mistakes that are known without PyTorch."""
    from titanlite.config.load import read  # not before signals are received: it takes a while

    try:
        options = cli.make_parser().parse(words)
        return read(find_config(options.config), options.overrides, world_size=world_size).resolve()
    except UserError:
        return None


def _import_and_fork(config: "Config", handlers: Handlers) -> Start:
    """Import what ranks import, and return what starts them: a fork server, or new processes where that is unsafe."""
    use_expandable_segments(os.environ)
    with importing():
        from titanlite.parallelize.compile import use_cache

        use_cache(config.compile)
        for name in IMPORTED:
            import_module(name)
    server = None
    try:
        server = ForkServer(_with_worker_server if config.data.num_workers else cli.main, handlers)
    except CannotFork as reason:
        print(f"each process imports PyTorch itself: no forks, because {reason}", file=sys.stderr)

    def start(command: Sequence[str], environ: Mapping[str, str], *, new_session: bool = True) -> Process:
        nonlocal server
        if server:
            try:
                return server.start(command, environ, new_session=new_session)
            except (EOFError, OSError) as error:
                print(f"each process imports PyTorch itself: the fork server failed, {error!r}", file=sys.stderr)
                server = None
        return subprocess.Popen(command, env=dict(environ), start_new_session=new_session)

    return start


def _with_worker_server() -> NoReturn:
    if sys.argv[1] == "train":
        fork_worker_server()
    cli.main()


def _launch(
    nodes: str, processes: str, endpoint: str, restarts: str, words: Sequence[str], folder: Path, start: Start
) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.run import main as torchrun

    from titanlite.runtime.private_torch.elastic import read_log_level, start_workers_by
    from titanlite.tools.rendezvous import BACKEND, FinalEnd, connect, newest_end

    if LOG_VARIABLE not in os.environ:
        os.environ[LOG_VARIABLE] = "ERROR"  # of this process: PyTorch reports a lost machine with C++ frames
        read_log_level()
        del os.environ[LOG_VARIABLE]
    signals = [one for one in (*STOP_SIGNALS, signal.SIGQUIT) if signal.getsignal(one) != signal.SIG_IGN]  # nohup
    start_workers_by(partial(_start_worker, start, signals))
    rendezvous_handler_registry.register(BACKEND, partial(connect, folder=folder, max_restarts=int(restarts)))
    logging.disable(logging.ERROR)  # torchrun reports what is reported here
    failure = ""
    try:
        torchrun(
            [
                f"--nnodes={nodes}", f"--nproc_per_node={processes}", f"--max-restarts={restarts}",
                f"--rdzv_backend={BACKEND}", f"--rdzv_endpoint={endpoint}", *address_options(endpoint, os.environ),
                f"--signals-to-handle={','.join(one.name for one in signals)}", f"--log-dir={folder}",
                "-m", "titanlite", *words,
            ]
        )  # fmt: skip
        return 0
    except SignalException:
        code = STOPPED
    except FinalEnd:
        code = FAILED
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        failure = f"rank {rank} (process {first.pid}) {describe_end(first.exitcode)}, without an error of its own"
        code = FAILED
    except Exception as error:
        failure, code = f"torchrun: {type(error).__name__}: {error}", FAILED
    if (left := read_end(newest_end(folder))[0]) is not None:
        return left
    if failure:
        print(f"error: {failure}", file=sys.stderr, flush=True)
    return code


def _start_worker(start: Start, signals: Sequence[int], command: Sequence[str], environ: Mapping[str, str]) -> Process:
    """Start a worker. The first signal to this process from now on lets torchrun pass it on, and wait for the workers.

    A further one would interrupt that wait, and schedulers repeat their signals: `_Requests` receives it.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    def stop(number: int, _: object) -> None:
        for one in signals:
            signal.signal(one, lambda *_: None)
        raise SignalException(f"SIGNAL {number}", sigval=signal.Signals(number))

    for one in signals:
        signal.signal(one, stop)
    return start(command, environ)


def address_options(endpoint: str, environ: Mapping[str, str]) -> list[str]:
    """Return torchrun's options about the address of this machine, and about how the machines find each other.

    With LOCAL_ADDR, the machine of that address hosts the rendezvous if it is the one that RDZV_ENDPOINT names.
    torchrun would look the machine's name up instead.
    """
    settings = [environ["RDZV_CONF"]] if environ.get("RDZV_CONF") else []
    address = environ.get("LOCAL_ADDR")
    if not address:
        return [f"--rdzv-conf={settings[0]}"] if settings else []
    settings.append(f"is_host={int(endpoint.rpartition(':')[0].strip('[]') == address)}")
    return [f"--local-addr={address}", f"--rdzv-conf={','.join(settings)}"]


def use_interface_of(environ: MutableMapping[str, str], endpoint: str | None = None) -> None:
    """Let gloo use the network interface of LOCAL_ADDR. It would look the machine's name up instead.

    Without LOCAL_ADDR, do so only where that name leads to this machine alone: `127.0.1.1 node0` in /etc/hosts.

    Args:
        endpoint: host:port of the first of several machines.
    """
    address = environ.get("LOCAL_ADDR") or (address_for_others(endpoint) if endpoint else None)
    if address and "GLOO_SOCKET_IFNAME" not in environ and (name := interface_of(address)):
        environ["GLOO_SOCKET_IFNAME"] = name


def address_for_others(endpoint: str) -> str | None:
    """Return the IPv4 address of this machine that others reach, if its own name leads to the loopback interface.

    It is the one on the way to the endpoint, or, on the endpoint's own machine, that of the default route. No packet is
    sent. None: the name is right, or there is no such address.
    """
    with suppress(OSError):
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            return None
    for host in (endpoint.rpartition(":")[0], DOCUMENTATION):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect((host, 9))
            address = asking.getsockname()[0]
            if not address.startswith("127."):
                return address
    return None


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine that has an IPv4 address. None: no interface has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _end_now(folder: Path, message: str, code: int) -> NoReturn:
    """End this process and all workers, which get some time to end by themselves."""
    print(message, file=sys.stderr, flush=True)
    for pid in _workers():
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGINT)
    deadline = time.monotonic() + GRACE_SECONDS
    while (workers := _workers()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in workers or _children():  # without workers, the check of the config
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL) if workers else os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


def _children() -> list[int]:
    """Return the child processes of this process; nothing where the system has no /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.append(int(stat.parent.name))
    return found


def _workers() -> list[int]:
    """Return the processes that torchrun has started: each leads a session of its own."""
    return [pid for pid in _children() if os.getpgid(pid) == pid]


def _set_environment(processes: int) -> None:
    """Set what torchrun and its workers read from the environment."""
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // processes))
    os.environ.setdefault(SHUTDOWN_VARIABLE, str(SHUTDOWN_SECONDS))


if __name__ == "__main__":
    main()
