"""What runs of tests leave out, or do once in a process, since it takes longer than the steps of a tiny run."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from titanlite.run.run_folder import _git_commit

REPLACED = {
    ("titanlite.train", "freeze_garbage_collector"): lambda: None,
    ("titanlite.parallelize.materialize", "free_tables"): lambda: None,  # the next run would make them again
    ("titanlite.run.run_folder", "_git_commit"): cache(_git_commit),
}
"""What stands for each of these functions of a module."""


def start_quickly(replace: Callable[[ModuleType, str, Any], Any] = setattr) -> None:
    """Replace the functions.

    Args:
        replace: called with a module, a name and what stands for it.
    """
    for (module, name), replacement in REPLACED.items():
        replace(import_module(module), name, replacement)
