"""torch.compile, block by block."""

from titanlite.models.base import Model


def compile_blocks(model: Model, *, backend: str = "inductor") -> None:
    """Compile each block in place. Blocks are alike, so the compiler works once for all of them; compiling in place
    (`block.compile()`, not `torch.compile(block)`) leaves parameter names alone."""
    for block in model.layers:
        block.compile(fullgraph=True, backend=backend)
