"""Folder of an export: written beside its place, and renamed at the end, so that there is a whole one or none."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from titanlite.runtime.errors import UserError
from titanlite.runtime.files import FileLocked, is_taken, lock_file
from titanlite.storage.storage import sync


class Target:
    """Place of an export. `begin` comes first, then files, then `commit`.

    Raises:
        UserError: the place is a URL.
    """

    def __init__(self, place: str) -> None:
        if "://" in place:
            raise UserError(f"--out: {place} is a URL: name a folder, and copy it afterwards, as by aws s3 sync")
        self.place = place
        self.path = Path(place).expanduser().absolute()
        self.staging = self.path.with_name(f".{self.path.name}.staging")

    def check(self) -> None:
        """Check that nothing would be overwritten.

        Raises:
            UserError: something is there.
        """
        if is_taken(self.path):
            raise UserError(f"{self.place} exists: name another --out, or delete it")

    def begin(self) -> None:
        """Start with an empty folder.

        Raises:
            UserError: another process writes there, or the folder cannot be made.
        """
        try:
            self.staging.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(self.staging / ".lock", timeout=0)
        except FileLocked as error:
            raise UserError(f"{self.place} is being written by {error.holder}") from None
        except OSError as error:
            raise UserError(f"--out: {self.place} cannot be written: {error.strerror or error}") from None
        for left in self.staging.iterdir():
            if left.name != ".lock":
                left.unlink()

    def write(self, name: str, content: bytes | Mapping[str, Tensor]) -> None:
        """Write a file, of safetensors if the content is tensors. It is durable on return."""
        path = self.staging / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.touch()
            mode = path.stat().st_mode  # that of the umask: the library leaves files to their owner alone
            save_file(dict(content), path, metadata={"format": "pt"})
            path.chmod(mode)
        sync(path)

    def commit(self) -> None:
        """Make the export count."""
        (self.staging / ".lock").unlink()
        sync(self.staging)
        self.check()
        os.rename(self.staging, self.path)
        sync(self.path.parent)
        self._lock.close()

    def discard(self) -> None:
        """Delete what was written and is not committed."""
        shutil.rmtree(self.staging, ignore_errors=True)
