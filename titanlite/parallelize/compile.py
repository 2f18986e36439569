"""torch.compile, block by block, and the folder of compiled code."""

import logging
import os
import tempfile
from pathlib import Path

import torch

from titanlite.models.base import Model, exchanges_tokens
from titanlite.schema import Compile

logger = logging.getLogger(__name__)


def compile_blocks(model: Model, *, backend: str = "inductor", has_other_sizes: bool = False) -> None:
    """Compile each block in place. Blocks are alike, so the compiler works once for all of them; compiling in place
    (`block.compile()`, not `torch.compile(block)`) leaves parameter names alone.

    Args:
        has_other_sizes: whether this process compiles blocks of a model with other sizes, too, or blocks for sequences
            of several lengths. The compiler would take their sizes for one that changes, and generate slower code, or
            fail.
    """
    for block in model.layers:
        if not exchanges_tokens(block):
            block.compile(fullgraph=True, backend=backend, dynamic=False if has_other_sizes else None)


def compile_around_exchange(model: Model, *, backend: str = "inductor", has_other_sizes: bool = False) -> None:
    """Compile blocks whose experts are on several ranks, in place: what comes before and after the exchange of tokens.

    The compiler cannot trace activation checkpointing around such a block, and would compile nothing. So this comes
    before. A part is recomputed as a whole, but for attention, which is kept where the policy keeps it.

    Args:
        has_other_sizes: as for `compile_blocks`.
    """
    for block in filter(exchanges_tokens, model.layers):
        block.forward = torch.compile(block.forward, backend=backend, dynamic=False if has_other_sizes else None)


def use_cache(config: Compile) -> None:
    """Let the compiler keep its work where the next start finds it. Its own default is a temporary folder.

    A folder that cannot be written gives a warning. Call this before torch._dynamo is imported, which the first model
    on the meta device does: the import fixes the folder. Triton's files go below the same folder.
    """
    if not config.enable or os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return
    try:
        caches = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(caches) if caches else Path.home() / ".cache") / "titanlite" / "compile"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # the latter: no home
        logger.warning(
            f"compile.enable: {error}; compiled code is kept in a temporary folder. TORCHINDUCTOR_CACHE_DIR in the "
            "environment names another"
        )
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.absolute())
