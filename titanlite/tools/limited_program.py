"""Program that evaluates templates of others within limits. It reads requests from a pipe, and answers.

`limited` starts it by its path, and nothing else imports it. What it evaluates is a program in a sandbox that keeps it
from files and from code, but not from endless loops and strings without end. So it gets limits on its processor time
and its memory here, and ends alone.
"""

import json
import os
import resource
import runpy
import signal
import sys
from multiprocessing.connection import Connection

OUT_OF_MEMORY = 3
"""Exit code of a process that has reached its limit of memory."""


def _limit_memory(more: int) -> None:
    """Limit the memory of this process to what it has, and more bytes."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(descriptor: int, worker: str, *, seconds: float, memory: int) -> None:
    """Answer the requests of a pipe until it ends.

    Args:
        descriptor: of the pipe.
        worker: Python file with a class `Worker`, whose method `answer` makes an object of JSON from a request.
        seconds: processor time of one request. SIGPROF ends this process where it takes more.
        memory: bytes, beside those of the program itself.
    """
    connection = Connection(descriptor)
    answer = runpy.run_path(worker)["Worker"]().answer
    _limit_memory(memory)
    while True:
        try:
            request = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            text = json.dumps(answer(request)).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(text)
        except (EOFError, OSError):
            return
        except MemoryError:
            os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], seconds=float(sys.argv[3]), memory=int(sys.argv[4]))
