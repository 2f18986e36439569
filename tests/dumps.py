"""Dumps of one step with an error planted, and their comparison by `titanlite parity --where`."""

from pathlib import Path

from tests.helpers import THREE_BLOCKS, TinyRun
from tests.layouts import built
from titanlite.schema import Config
from titanlite.tools.report.dump_step import record
from titanlite.tools.report.value_dump import read_dump
from titanlite.tools.report.where import Compared, compare_dumps

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
PLANTED: dict[str, tuple[list[str], int, str, str, str]] = {
    "mask": (["--model.args.mistake=mask"], 1, "layers.1.attention", "forward", "computes for layers.1.attention.wo"),
    "stale weight": (["--model.args.mistake=weight"], 2, "layers.1.attention.wq", "forward", "its output differs"),
    "dtype": (
        ["--model.args.mistake=dtype"], 1, "layers.1.feed_forward.w2", "forward",
        "its dtype is bfloat16 in A and float32 in B",
    ),
    "another block": (
        ["--model.args.mistake=dtype", "--model.args.at_block=2"], 1, "layers.2.feed_forward.w2", "forward", "dtype",
    ),
    "gradient of an input": (
        ["--model.args.mistake=input gradient"], 1, "layers.1.feed_forward.w2", "gradient", "computed before it agree",
    ),
    "gradient of a weight": (
        ["--model.args.mistake=weight gradient"], 1, "layers.1.feed_forward.w2", "gradient",
        "the gradient of the parameter layers.1.feed_forward.w2.weight differs",
    ),
    "learning rate": ([GROUPS % (0.02, 0.1)], 1, "layers.1", "update", "update of the parameter"),
    "weight decay": ([GROUPS % (0.01, 0.5)], 1, "layers.1", "update", "update of the parameter"),
}  # fmt: skip
"""Options of each error, the step that is compared, and the module, the direction and a part of the reason to name."""


def dumped(rank: int, world_size: int, config: Config, folder: Path, *, step: int = 1) -> None:
    """Write a dump of a step."""
    record(built(rank, world_size, config), folder=folder, step=step)


def options(*more: str, name: str) -> list[str]:
    return [*OPTIONS, *more, f"--job.name={name}"]


def compared(tiny: TinyRun, name: str, reference: str) -> Compared:
    return compare_dumps(*(read_dump(tiny.folder / it) for it in (name, reference)))
