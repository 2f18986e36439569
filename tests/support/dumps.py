"""Dumps of one step with an error planted, and their comparison by `titanlite parity --where`."""

from pathlib import Path

from tests.support.helpers import THREE_BLOCKS, TinyRun
from tests.support.layouts import built
from titanlite.schema import Config
from titanlite.tools.report.compare import Compared, compare_dumps, read_dump, record

FILE = Path(__file__).with_name("planted.py")
OPTIONS = [
    f"--model.file={FILE}",
    "--checkpoint.enable=false",
    THREE_BLOCKS,
    "--model.args.max_seq_len=32",
]
OTHERS = '"tok_embeddings.*", "layers.0.*", "layers.2.*", "head.*"'
GROUPS = f'--optimizer.groups=[{{match=["layers.1.*"], lr=%s, weight_decay=%s}}, {{match=[{OTHERS}]}}]'
"""Options of the optimizer with a group for block 1."""
PLANTED: dict[str, tuple[list[str], int, str]] = {
    "mask": (["--model.args.mistake=mask"], 1, "forward input layers.1.attention.wo"),
    "stale weight": (["--model.args.mistake=weight"], 2, "forward output layers.1.attention.wq"),
    "dtype": (["--model.args.mistake=dtype"], 1, "forward output layers.1.feed_forward.w2"),
    "another block": (
        ["--model.args.mistake=dtype", "--model.args.at_block=2"], 1, "forward output layers.2.feed_forward.w2",
    ),
    "gradient of an input": (
        ["--model.args.mistake=input gradient"], 1, "gradient input layers.1.feed_forward.w2",
    ),
    "gradient of a weight": (
        ["--model.args.mistake=weight gradient"], 1, "gradient parameter layers.1.feed_forward.w2.weight",
    ),
    "learning rate": ([GROUPS % (0.02, 0.1)], 1, "update parameter layers.1."),
    "weight decay": ([GROUPS % (0.01, 0.5)], 1, "update parameter layers.1."),
}  # fmt: skip
"""Options of each error, the step that is compared, and the beginning of the first tensor to name."""


def dumped(rank: int, world_size: int, config: Config, folder: Path, *, step: int = 1) -> None:
    """Write a dump of a step."""
    record(built(rank, world_size, config), folder=folder, step=step)


def options(*more: str, name: str) -> list[str]:
    return [*OPTIONS, *more, f"--job.name={name}"]


def compared(tiny: TinyRun, name: str, reference: str) -> Compared:
    return compare_dumps(*(read_dump(tiny.folder / file) for file in (name, reference)))
