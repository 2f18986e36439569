"""Fake ranks: this process as one of many, on tensors that have shapes and no values."""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.tracing import ValueNeeded, fake_process_group, propagate_shardings_without_modes


@contextmanager
def fake_ranks(world_size: int, *, rank: int = 0) -> Iterator[None]:
    """Make this process one of many ranks, whose tensors may be fake, within the context.

    Raises:
        UserError: code within the context asks a fake tensor for values.
    """
    with (
        fake_process_group(world_size, rank=rank),
        propagate_shardings_without_modes(),
        warnings.catch_warnings(),
        _explained_need_of_values(),
    ):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _explained_need_of_values() -> Iterator[None]:
    try:
        yield
    except ValueNeeded as error:
        places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        ours = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/"
        file, line = [place for place in places if not place[0].startswith(ours)][-1]
        raise UserError(
            f"the step cannot be traced: {Path(file).name}:{line} asks for values ({error.func}), and a plan's "
            "tensors have none"
        ) from error
