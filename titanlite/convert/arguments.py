"""Arguments of `titanlite checkpoint export`."""

from argparse import Namespace

from titanlite.runtime.arguments import Parser

CHECKPOINT = "a checkpoint, the folder of a run (its newest complete one), or a URL of either (s3://...)"
EXPORT = """\
hf writes a folder that transformers and vLLM load, torch one file that torch.load(weights_only=True) reads.
"""


def add_commands(titanlite: Parser, checkpoint: Parser) -> None:
    """Add the commands that work on weights.

    Args:
        checkpoint: group of `titanlite checkpoint`.
    """
    _add_export(checkpoint)


def add_source(parser: Parser, *, about: str = CHECKPOINT) -> None:
    """Add the arguments of `open_source`."""
    parser.add_argument("path", metavar="CKPT", help=about)
    parser.add_argument(
        "--config", metavar="CONFIG", help="config of the run, for checkpoints of versions that did not keep it"
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="tokenizer, instead of the run's data.tokenizer")


def _add_export(checkpoint: Parser) -> None:
    parser = checkpoint.add_command(
        "export",
        "write the weights of a checkpoint for other programs",
        _export,
        details=EXPORT.rstrip(),
        example="checkpoint export outputs/debug --format torch --out debug.pt --dtype bfloat16",
    )
    add_source(parser)
    parser.add_argument("--format", choices=["torch"], required=True, help="what to write")
    parser.add_argument("--out", metavar="PATH", required=True, help="file or folder to write; it must not exist")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default=None, help="dtype of the weights; default: as they are"
    )


def _export(options: Namespace) -> None:
    from titanlite.convert.command import export

    names = "path", "config", "tokenizer", "format", "out", "dtype"
    export(**{name: getattr(options, name) for name in names})
