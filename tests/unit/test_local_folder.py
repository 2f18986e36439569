"""Saves on a disk of this node that a killed start has left: which are copied, and what is refused."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers import TinyRun
from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.local import LocalFolder, new_name, recover
from titanlite.checkpoint.manifest import FileRecord, Manifest, folder_name
from titanlite.runtime.errors import ConfigError
from titanlite.storage.storage import MANIFEST, LocalStorage

pytestmark = pytest.mark.usefixtures("single_process_group")
DATA = b"weights and moments"
RECORD = FileRecord(len(DATA), "445b03f0")


class Node:
    """A disk of this node, and the place that all nodes share."""

    def __init__(self, folder: Path) -> None:
        self.local = LocalFolder(str(folder / "local"), "me")
        self.storage = LocalStorage(str(folder / "shared"), "me")

    def left(self, step: int, *, data: bytes = DATA, name: str = "", **changes: Any) -> Path:
        """Leave a save of one file, whose manifest may be another one."""
        folder = self.local.storage.root / (name or new_name(folder_name(step)))
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(data)
        fields: dict[str, Any] = {
            "step": step, "samples": 0, "run_id": "me", "settings": {}, "config_hash": "", "mesh": {}, "versions": {},
            "saved_at": 1000.0 + step, "elapsed_seconds": 1.0, "load_step": None, "files": {"__0_0.distcp": RECORD},
        }  # fmt: skip
        (folder / MANIFEST).write_bytes(Manifest(**(fields | changes)).to_json())
        return folder

    def recover(self) -> list[int]:
        """Return the steps that count then."""
        group = dist.group.WORLD
        assert group is not None
        recover(self.local, self.storage, group=group)
        assert not self.local.storage.root.exists()
        listing = self.storage.list()
        steps = manifests.committed_steps(listing)
        for folder in map(folder_name, steps):
            manifests.verify(self.storage, folder, listing[folder])
        return steps


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(logging.getLogger("titanlite"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_complete_saves_are_copied_the_oldest_first(node: Node, warnings: Callable[[], list[str]]) -> None:
    node.left(4)
    node.left(2)
    assert node.recover() == [2, 4]
    assert node.recover() == [2, 4]
    assert warnings() == []


def test_a_save_that_was_committed_is_deleted(node: Node, warnings: Callable[[], list[str]]) -> None:
    node.left(4)
    node.recover()
    node.left(4)
    assert node.recover() == [4]
    assert warnings() == []


def test_saves_of_another_branch_do_not_come_back(node: Node, warnings: Callable[[], list[str]]) -> None:
    node.left(6)
    node.recover()
    node.left(4)
    node.left(8, saved_at=1005.0)  # before step 6 was: the run was on other nodes since
    assert node.recover() == [6]
    assert len(warnings()) == 2
    assert all("the run has continued elsewhere since, to step 6" in warning for warning in warnings())


DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "changed": ({"data": DATA[:-1] + b"!"}, "has changed since it was written"),
    "cut": ({"data": DATA[:-1]}, "1 of its 1 files are on no node of this start"),
    "of another run": ({"run_id": "other"}, "its manifest is of step 4 of the run other"),
    "of another step": ({"name": "step-00000005-00000000"}, "its manifest is of step 4 of the run me"),
    "a name that leads elsewhere": ({"files": {"../../victim": RECORD}}, "'../../victim' is not a name"),
    "another format": ({"format": 1}, "has format 1"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_or_of_others_is_deleted_with_one_line(
    node: Node, damage: str, warnings: Callable[[], list[str]]
) -> None:
    victim = node.storage.root.parent / "victim"
    victim.write_bytes(DATA)
    node.left(2)
    changes, reason = DAMAGE[damage]
    node.left(4, **changes)
    assert node.recover() == [2]
    [warning] = warnings()
    assert warning.startswith("checkpoint.local_folder: step-0000000")
    assert reason in warning
    assert sorted(os.listdir(node.storage.root)) == [folder_name(2)]
    assert victim.read_bytes() == DATA


@pytest.mark.parametrize("text", [None, b"", b"[" * 100_000, json.dumps({"format": 2, "files": []}).encode(), b"\xff"])
def test_without_a_manifest_that_is_right_a_save_is_not_complete(
    node: Node, text: bytes | None, warnings: Callable[[], list[str]]
) -> None:
    manifest = node.left(4) / MANIFEST
    manifest.unlink()
    if text is not None:
        manifest.write_bytes(text)
    assert node.recover() == []
    assert len(warnings()) == 1


def test_folders_of_others_are_not_touched(node: Node) -> None:
    root = node.local.storage.root
    other = root.parent / "other-run" / "step-00000002-00000000"
    other.mkdir(parents=True)
    (root / "step-00000004").mkdir(parents=True)
    (root / "step-00000004-0000000g").symlink_to(other)
    assert node.recover() == []
    assert other.is_dir()


@pytest.mark.parametrize(
    ("local", "reason"),
    [
        ("s3://bucket/run", "is a URL"),
        ("local", "local is relative"),
        ("$NO_SUCH_VARIABLE/x", r"the environment variable \$NO_SUCH_VARIABLE is not set on this node"),
        ("{outputs}/tiny/checkpoints/local", "is inside .*checkpoints, where checkpoints are copied to"),
        ("/proc/local", "/proc cannot be written"),
    ],
)
def test_folders_that_cannot_be_local(tiny: TinyRun, local: str, reason: str) -> None:
    place = local.format(outputs=tiny.folder / "outputs")
    with pytest.raises(ConfigError, match=f"^checkpoint.local_folder: {reason}"):
        tiny.config(f"--checkpoint.local_folder={place}")
    assert tiny.config(f"--checkpoint.local_folder={place}", "--checkpoint.enable=false").checkpoint.enable is False
