"""Forks of run_train.sh's fork server: they have what new processes have, and end as those do."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import needs_forks

pytestmark = needs_forks

PROGRAM = """
import json, multiprocessing, os, random, signal, subprocess, sys, threading, time
import numpy
from titanlite.tools.fork_server import CannotFork, ForkServer, fork_worker_server
{prelude}

def run():
    what = sys.argv[2]
    if what == "exit":
        os._exit(7)
    if what == "raise":
        raise KeyError("planted")
    if what == "sleep":
        time.sleep(100)
    if what == "work":
        file = open(__file__)
        fork_worker_server()
        worker = multiprocessing.get_context("forkserver").Process(target=exec, args=[WORKER, {{}}])
        worker.start()
        worker.join()
        os._exit(worker.exitcode)
    main = threading.main_thread()
    print(json.dumps({{
        "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "group": os.getpgid(0),
        "argv": sys.argv, "orig_argv": sys.orig_argv, "command": open("/proc/self/cmdline").read().split("\\0"),
        "environ": dict(os.environ), "getenv": subprocess.check_output(["env"], text=True).split("\\n"),
        "SIGHUP": signal.getsignal(signal.SIGHUP) == signal.SIG_IGN,
        "SIGTERM": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "thread": main.native_id, "main": sys.modules["__main__"].__spec__.name,
        "files": subprocess.check_output(["ls", "-l", f"/proc/{{os.getpid()}}/fd"], text=True),
        "random": random.random(), "numpy": numpy.random.rand(),
    }}), flush=True)
    os._exit(0)

WORKER = '''
import json, os, signal, sys
def words(pid):
    return open(f"/proc/{{pid}}/cmdline").read().split(chr(0))
def parent(pid):
    return int(open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[1])
server = parent(os.getpid())
print(json.dumps({{
    "numpy": "numpy" in sys.modules, "orig_argv": sys.orig_argv[1:], "server": words(server)[1:3], "pid": server,
    "rank": words(parent(server))[1:6], "blocked": signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []),
    "SIGTERM": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "files": [
        os.readlink(f"/proc/{{server}}/fd/{{name}}") for name in os.listdir(f"/proc/{{server}}/fd")],
}}), flush=True)
'''

handlers = {{signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_IGN}}
try:
    server = ForkServer(run, handlers)
except CannotFork as reason:
    print(json.dumps(str(reason)))
    sys.exit()

def start(what, environ, **options):
    return server.start([sys.executable, "-u", "-m", "titanlite", "train", what], environ, **options)

{body}
"""


def results(tmp_path: Path, body: str, *, prelude: str = "", **options: Any) -> list[Any]:
    """Return what each line says that the program prints, read as JSON."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(prelude=prelude, body=body))
    words = [sys.executable, file, "words", "that", "are longer than", "those of its forks " + 40 * "."]
    environ = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environ, **options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
def test_a_fork_has_what_a_new_process_has(tmp_path: Path) -> None:
    with open(tmp_path / "lock", "w") as lock:
        found, other, launcher = results(
            tmp_path,
            """
environ = {"RANK": "3", "PATH": os.environ["PATH"]}
os.environ["ONLY_OF_THE_LAUNCHER"] = "1"
for new_session in (True, False):
    start("report", environ, new_session=new_session).wait()
print(json.dumps({"pid": os.getpid(), "group": os.getpgid(0)}))
""",
            pass_fds=[lock.fileno()],
        )
    for one in (found, other):
        assert one["parent"] == launcher["pid"]
        assert one["thread"] == one["pid"]
        assert one["environ"] == {"RANK": "3", "PATH": os.environ["PATH"]}
        assert {line.partition("=")[0] for line in one["getenv"]} - {""} == {"RANK", "PATH"}
        assert [one["SIGHUP"], one["SIGTERM"], one["main"]] == [True, True, "titanlite.__main__"]
        assert Path(one["argv"][0]).parts[-2:] == ("titanlite", "__main__.py")
        assert one["argv"][1:] == ["train", "report"]
        assert one["orig_argv"][1:] == ["-u", "-m", "titanlite", "train", "report"]
        assert " ".join(one["command"]).rstrip() == " ".join([*one["orig_argv"], "(rank 3)"])
        assert str(tmp_path) not in one["files"], "the file that the shell has opened"
    assert [found["session"], found["group"]] == [found["pid"], found["pid"]]
    assert other["group"] == launcher["group"]
    assert found["random"] != other["random"]
    assert found["numpy"] != other["numpy"]


@pytest.mark.long
def test_loader_workers_are_forks_of_forks(tmp_path: Path) -> None:
    """They have what their rank has imported, and their server ends with the rank."""
    found, code = results(tmp_path, """print(start("work", {"PATH": os.environ["PATH"]}).wait())""")
    assert found["numpy"]
    assert found["orig_argv"] == found["rank"] == ["-u", "-m", "titanlite", "train", "work"]
    assert found["server"] == ["-m", "multiprocessing.forkserver"]
    assert [found["blocked"], found["SIGTERM"]] == [True, True]
    assert not [file for file in found["files"] if file.startswith("/") and file != "/dev/null"]
    assert code == 0
    deadline = time.monotonic() + 20
    while Path(f"/proc/{found['pid']}/cmdline").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.long
def test_a_server_that_is_stopped_is_replaced_at_once_and_ends_with_the_launcher(tmp_path: Path) -> None:
    first, reason, seconds, second = results(
        tmp_path,
        """
[first] = map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split())
os.kill(first, signal.SIGSTOP)
began = time.monotonic()
try:
    start("exit", {})
except OSError as error:
    reason = str(error)
server = ForkServer(run, handlers)
[second] = map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split())
os.kill(second, signal.SIGSTOP)
for value in (first, reason, time.monotonic() - began, second):
    print(json.dumps(value))
""",
    )
    assert reason == "it is stopped"
    assert seconds < 50, "a server that does not answer is waited for a minute"
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in (first, second)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.long
def test_forks_end_as_processes_do(tmp_path: Path) -> None:
    found = results(
        tmp_path,
        """
codes = [start(what, {}).wait() for what in ("exit", "raise")]
sleeping = start("sleep", {})
try:
    sleeping.wait(0.1)
except subprocess.TimeoutExpired as error:
    codes.append("runs")
os.killpg(sleeping.pid, signal.SIGTERM)
codes.append(sleeping.wait())
orphans = subprocess.run(["sh", "-c", "sleep 1 & echo $!"], stdout=subprocess.PIPE, text=True).stdout
codes.append(open(f"/proc/{int(orphans)}/stat").read().split()[3] == str(os.getpid()))
[theirs] = [int(pid) for pid in open(f"/proc/self/task/{os.getpid()}/children").read().split()]
codes.append(open(f"/proc/{theirs}/cmdline").read().split("\\0")[1:3])
os.kill(theirs, signal.SIGTERM)
codes.append(start("exit", {}).wait())
os.kill(theirs, signal.SIGKILL)
try:
    start("exit", {})
except (EOFError, OSError):
    codes.append("the server has ended")
print(json.dumps(codes))
""",
    )
    assert found == [
        [7, 1, "runs", -15, False, ["-m", "titanlite.tools.fork_server"], 7, "the server has ended"],
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("prelude", "reason"),
    [
        ("sys.settrace(lambda *_: None)", "debugger|tracer"),
        ("threading.Thread(target=time.sleep, args=[100], daemon=True).start()", "threads"),
        ("sys.platform = 'darwin'", "Linux"),
        ("import titanlite.runtime.private_torch.elastic as e; e.has_lost_cuda = lambda: True", "CUDA"),
        ("os.fork = lambda: open('/nowhere')", "FileNotFoundError"),
    ],
)
def test_where_a_fork_would_differ_there_is_none(tmp_path: Path, prelude: str, reason: str) -> None:
    [found] = results(tmp_path, "", prelude=prelude)
    assert re.search(reason, found)


@pytest.mark.long
def test_threads_that_end_before_a_fork_are_no_reason(tmp_path: Path) -> None:
    """numpy's OpenBLAS starts a thread for each core, and ends them before a fork."""
    prelude = "before = len(os.listdir('/proc/self/task'))"
    [found] = results(tmp_path, "print(json.dumps([before, start('exit', {}).wait()]))", prelude=prelude)
    assert found[1] == 7
    assert found[0] > 1 or os.cpu_count() == 1 or "OMP_NUM_THREADS" in os.environ
