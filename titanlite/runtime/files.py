"""Names from files, atomic writes, file locks, and quarantine of damaged files."""

import errno
import fcntl
import getpass
import hashlib
import itertools
import json
import math
import os
import platform
import re
import resource
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from titanlite.runtime.errors import UserError

PLAIN_NAME = re.compile(r"[\w.-]+", re.ASCII)
"""Letters, digits, dots and dashes: what titanlite's own names of files and runs consist of."""


BLOCK = 2**20
"""Bytes to read at once."""
SMALL = 2**28
"""Bytes that a config, a tokenizer or an index may have. The largest known tokenizer.json has an eighth of it."""
LEAST_OPEN_FILES = 64
"""Files that a process has open with a margin: of two ranks, each has about 30."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors of file systems without locks."""


class FileLocked(Exception):
    """Another process holds the lock of a file.

    Args:
        holder: that process and its host, as it wrote them.
    """

    def __init__(self, holder: str) -> None:
        super().__init__(f"locked by {holder}")
        self.holder = holder


def checked_name(name: object) -> str:
    """Return a name that was read from a file, if it may become one part of a path.

    Raises:
        ValueError: the name is no text, is empty, could lead to another folder, or holds unusual characters.
    """
    if not isinstance(name, str) or not PLAIN_NAME.fullmatch(name) or ".." in name or name == ".":
        raise ValueError(f"{name!r} is not a name")
    return name


def file_inside(folder: Path, name: object) -> Path:
    """Return the path of a file in a folder of others: of weights, a tokenizer, a template, a config, a record.

    The files of Hugging Face's own cache are links from snapshots/<revision>, and folders in it, to blobs beside it.

    Args:
        name: as another file of the folder, or titanlite, gives it.

    Raises:
        UserError: it is no name, or the name or a link of this name leads elsewhere.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise UserError(f"{folder}: {name!r} is no name of a file: refused")
    real = Path(os.path.realpath(folder))
    path = Path(os.path.realpath(folder / name))
    blobs = [folder.parent / "blobs" for folder in (real.parent, real.parent.parent) if folder.name == "snapshots"]
    if name != os.path.basename(name) or name in (".", "..") or path.parent not in (real, *blobs):
        raise UserError(f"{folder}: {name!r} leads out of the folder: refused")
    return folder / name


def file_beside(path: Path, name: str) -> Path | None:
    """Return a file that lies beside another in a folder of others; None if there is none.

    Raises:
        UserError: it is a link that leads out of the folder.
    """
    return file_inside(path.parent, name) if path.with_name(name).is_file() else None


class NotSmall(OSError, ValueError):
    """What should be a small file is a pipe, a device, a folder, or large."""


def read_small(path: Path, most: int = SMALL) -> bytes:
    """Return the content of a file that is small if it is what it should be.

    Args:
        most: bytes that are read at most.

    Raises:
        NotSmall: it is larger, or no file. A named pipe would be waited for, and a device may have no end.
        OSError: it cannot be read.
    """
    with naming_path(path), open(path, "rb", 0, opener=_open_now) as file:
        content, size = bytearray(), os.fstat(file.fileno()).st_size
        while size <= most and (block := file.read(BLOCK)):
            content += block
            size = max(size, len(content))  # the file may grow meanwhile
        if size > most:
            raise NotSmall(errno.EFBIG, f"has {size:,} bytes, and {most:,} are read at most", str(path))
        return bytes(content)


def _open_now(path: str, flags: int) -> int:
    """Open a file that is to be read. Nothing is waited for, and nothing but a file is opened."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotSmall(errno.EINVAL, "is not a file", path)
    return descriptor


def write_all(file: Any, data: bytes | memoryview) -> None:
    """Write all of `data` to a file without a buffer, which may take only a part (a full disk, a quota, NFS, FUSE).

    Raises:
        OSError: not all of it can be written.
    """
    rest = memoryview(data).cast("B")
    while rest:
        taken = file.write(rest)
        if not taken:
            raise OSError(errno.EIO, "nothing more can be written")
        rest = rest[taken:]


@contextmanager
def naming_path(path: Path) -> Iterator[None]:
    """Add the path to errors of reading, writing and syncing, which lack it."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error


def write_atomically(path: Path, content: str | bytes | memoryview, *, mode: int = 0o666) -> None:
    """Write a file so that it holds the old text or the new text, never a part, also after a loss of power.

    Args:
        mode: permissions of a new file, before the umask.
    """
    staging = path.with_name(f".{path.name}.staging")
    staging.unlink(missing_ok=True)  # a killed process may have left it with other permissions
    with naming_path(path), open(staging, "wb", 0, opener=lambda file, flags: os.open(file, flags, mode)) as file:
        write_all(file, content.encode() if isinstance(content, str) else content)
        os.fsync(file.fileno())
    os.replace(staging, path)


def json_text(value: Any, **options: Any) -> str:
    """Return a value as JSON, which has no NaN and no infinity: they become null.

    Args:
        options: of `json.dumps`.
    """

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: finite(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [finite(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), allow_nan=False, **options)


def publish(staging: Path, folder: Path, *, last: str) -> None:
    """Rename a complete folder to its place. If another machine was faster, its folder stays: others may be reading it.

    Args:
        last: file that a folder has only when it is complete.

    Raises:
        OSError: something else is in the place.
    """
    try:
        os.rename(staging, folder)
    except OSError:
        shutil.rmtree(staging)
        if not (folder / last).is_file():
            raise


def is_taken(path: Path) -> bool:
    """Return whether something is at a path, a link too, but for an empty folder."""
    return path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir())))


def check_out(place: str | Path, *, replaces_file: bool = False) -> None:
    """Check that --out of a command would replace nothing.

    Args:
        replaces_file: a file of before may be replaced.

    Raises:
        UserError: something is there: a link, a folder with something in it, or a file.
    """
    path = Path(place).expanduser()
    kind = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "a file"
    if is_taken(path) if not replaces_file else kind != "a file":
        raise UserError(f"--out: {place} exists and is {kind}: name another, or delete it")


def quarantine_path(path: Path) -> Path:
    """Return the first free name among <name>.damaged-1, <name>.damaged-2, ... beside a file."""
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def put_aside_unless_file(path: Path) -> Path | None:
    """Rename what is in the place of a file to append to, and is none. Opening a pipe would wait for its reader.

    Returns:
        its new path; None if it is a file or a device of characters, or there is nothing.
    """
    if not path.exists() or path.is_file() or path.is_char_device():
        return None
    aside = quarantine_path(path)
    path.rename(aside)
    return aside


def lock_file(
    path: Path, *, timeout: float = math.inf, on_wait: Callable[[str], None] = lambda holder: None
) -> IO[str]:
    """Lock a file for this process, and create it if necessary.

    Args:
        timeout: seconds to wait for another process.
        on_wait: called once with the holder, when the lock has to be waited for.

    Returns:
        the open file. Closing it releases the lock; so does the end of the process, however it ends.

    Raises:
        FileLocked: another process still holds the lock after `timeout`.
        OSError: the file is a link or no file, it cannot be opened, or the file system has no locks.
    """
    file = open(path, "a+", opener=_open_without_links)  # noqa: SIM115 (returned open)
    deadline = time.monotonic() + timeout
    waited = False
    while True:
        try:
            with naming_path(path):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            if time.monotonic() > deadline:
                file.close()
                raise FileLocked(holder) from None
            if not waited:
                on_wait(holder)
                waited = True
            time.sleep(0.1)
        except BaseException:
            file.close()
            raise
        else:
            with suppress(OSError):  # on a full disk, the note stays empty
                os.truncate(file.fileno(), 0)
                os.write(file.fileno(), f"process {os.getpid()} on {platform.node()}\n".encode())
            return file


def _open_without_links(path: str, flags: int) -> int:
    """Open a lock. A link could lead to a file that is no lock, which would lose its content."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a file", path)
    return descriptor


def lock_work(path: Path, *, on_wait: Callable[[str], None]) -> IO[str]:
    """Lock a file, so that one process does some work and the others find it done.

    On a file system without locks (some NFS and Lustre mounts), one process of each machine does the work: the lock is
    in this machine's temporary folder then.

    Arguments, result and errors: see `lock_file`.
    """
    try:
        return lock_file(path, on_wait=on_wait)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    folder = Path(tempfile.gettempdir(), f"titanlite-locks-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "is not a folder of this user", str(folder))
    return lock_file(folder / hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32], on_wait=on_wait)


def leave_deleted_folder() -> None:
    """Change to a folder in which nothing is, and nothing can be made, if the current one was deleted.

    Libraries end a process without a current folder (MKL). Absolute paths work, and relative ones lead nowhere.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        print("warning: the current folder was deleted: relative paths lead nowhere", file=sys.stderr, flush=True)
        with suppress(OSError):
            os.chdir("/proc/self/fdinfo")


def check_open_files() -> None:
    """Check that this process may open as many files as training has open at least.

    Raises:
        UserError: it may not.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= limit < LEAST_OPEN_FILES:
        raise UserError(f"this process may open {limit} files, and needs {LEAST_OPEN_FILES}: raise `ulimit -n`")


def why_not_writable(folder: str) -> str | None:
    """Return the reason why files cannot be written into a folder or the folder cannot be created; None if they can."""
    path = Path(os.path.expanduser(folder)).absolute()
    existing = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not existing.is_dir():
        return f"{existing} is a file, not a folder: name another folder"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} cannot be written: name another folder, or change its permissions"
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:  # permissions do not show a quota or a file system of the kernel
        return f"{existing} cannot be written ({error.strerror}): name another folder"


def is_file_url(path: str) -> bool:
    """Return whether a path is a URL of files, whose name has an extension of letters or a `*`, and not of a folder."""
    return re.fullmatch(r"\w+://[^/]+/(.*/)?[^/]*(\*[^/]*|\.[A-Za-z]+)", path) is not None


class Room(NamedTuple):
    """Room of a file system, in bytes; both are 0 where it has no limit."""

    free: int
    whole: int

    @property
    def usable(self) -> float:
        """Bytes to take at most: a tenth, but 1 GiB at most, is left to others. Loaders send batches through /dev/shm,
        and GPUs exchange data through it."""
        return self.free - min(self.whole // 10, 2**30) if self.whole else math.inf


def room_in(folder: Path) -> Room:
    """Return the room of the file system of a folder, or of the nearest folder above it that exists."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    about = os.statvfs(existing)
    return Room(about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize)


def memory_folder(given: str | None) -> Path:
    """Return the folder of this user's local copies: as given, or in memory where the system has /dev/shm."""
    if given is not None:
        return Path(given).expanduser().resolve()
    memory = Path("/dev/shm")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in containers, a user may have no name
        user = str(os.getuid())
    return (memory if memory.is_dir() else Path(tempfile.gettempdir())) / f"titanlite-{user}"
