"""Arguments of `titanlite checkpoint export` and `import`."""

from argparse import Namespace

from titanlite.tools.arguments import Parser

CHECKPOINT = "a checkpoint, the folder of a run (its newest complete one), or a URL of either (s3://...)"
EXPORT = """\
hf writes a folder for transformers and others: config.json, safetensors, tokenizer. torch writes one file, which
torch.load(weights_only=True) reads. Of a run with [lora], hf writes the adapters in PEFT's format. An export that was
killed resumes when the same command is started again.
"""
IMPORT = """\
Reads a Hugging Face folder, a step of torchtitan, or Meta's consolidated.*.pth. The checkpoint is of step 0 and has the
model alone, for checkpoint.initial_load_path and for the commands that take a checkpoint. Training needs no import:
checkpoint.initial_load_path takes the same folders.
"""


def add_commands(titanlite: Parser, checkpoint: Parser) -> None:
    """Add the commands that work on weights.

    Args:
        checkpoint: group of `titanlite checkpoint`.
    """
    _add_export(checkpoint)
    _add_import(checkpoint)


def add_source(parser: Parser, *, about: str = CHECKPOINT) -> None:
    """Add the arguments of `open_source`."""
    parser.add_argument("path", metavar="CKPT", help=about)
    parser.add_argument(
        "--config",
        metavar="CONFIG",
        help="config of the run, for checkpoints that do not keep it, or whose own names code or data",
    )
    parser.add_argument(
        "--model-file",
        metavar="FILE",
        help="code of a model of your own (model.file): a checkpoint's own word is refused",
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="tokenizer, instead of the run's data.tokenizer")


def _add_export(checkpoint: Parser) -> None:
    parser = checkpoint.add_command(
        "export",
        "write the weights of a checkpoint for other programs",
        _export,
        details=EXPORT.rstrip(),
        example="checkpoint export outputs/debug --out debug_hf --dtype bfloat16\n"
        "checkpoint export outputs/debug --format torch --out debug.pt",
    )
    add_source(parser)
    parser.add_argument("--format", choices=["hf", "torch"], default="hf", help="what to write; default: hf")
    parser.add_argument("--out", metavar="PATH", required=True, help="folder, URL, or file; it must not exist")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default=None,
        help="dtype of the weights; default: as they are",
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="largest file of weights; default: 5GB")
    parser.add_argument(
        "--drop",
        metavar="GLOB",
        action="append",
        default=[],
        help="leave out tensors that the format has no place for, such as layers.*.feed_forward.bias_E",
    )
    parser.add_argument(
        "--merge", action="store_true", help="of a run with [lora]: write the whole model, with the adapters merged"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare what transformers computes with our model, block by block"
    )
    parser.add_argument("--no-tokenizer", action="store_true", help="write no files of the tokenizer")


def _export(options: Namespace) -> None:
    from titanlite.tools.convert.command import export

    names = "path", "config", "model_file", "tokenizer", "format", "out", "dtype", "max_shard_size", "drop"
    export(**{name: getattr(options, name) for name in (*names, "no_tokenizer", "check", "merge")})


def _add_import(checkpoint: Parser) -> None:
    parser = checkpoint.add_command(
        "import",
        "write weights of another program as a checkpoint",
        _import,
        details=IMPORT.rstrip(),
        example="checkpoint import models/Qwen3-0.6B --out outputs/qwen3\n"
        "checkpoint import torchtitan/outputs/checkpoint/step-1000 --model llama3 --flavor 8B --out outputs/llama3\n"
        "checkpoint import models/Qwen3-30B-A3B --experts keep=64 --sample 'texts/*.txt' --out outputs/student",
    )
    parser.add_argument("path", metavar="DIR_OR_FILE", help="weights of another program")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder or URL for the checkpoint, step-00000000")
    parser.add_argument("--model", metavar="NAME", help="model family; default: what the weights describe")
    parser.add_argument(
        "--flavor", metavar="NAME", help="flavor of the family; default: what the weights describe, or what fits"
    )
    parser.add_argument("--config", metavar="CONFIG", help="config with the model, instead of --model and --flavor")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default=None, help="dtype of the weights; default: as they are"
    )
    parser.add_argument(
        "--allow-unexpected",
        metavar="GLOB",
        action="append",
        default=[],
        help="leave out tensors that the model does not have",
    )
    parser.add_argument(
        "--layers", metavar="LIST", help="take these layers alone, such as 0,2,4-7; also of a checkpoint of titanlite"
    )
    parser.add_argument(
        "--experts",
        metavar="keep=K",
        help="keep the K experts of each layer that its router uses most on --sample; also of titanlite's checkpoints",
    )
    parser.add_argument("--sample", metavar="PATH", help="text or prepared tokens on which the routers are watched")
    parser.add_argument(
        "--sample-tokens", metavar="N", type=int, default=262_144, help="tokens of the sample; default: 262144"
    )
    parser.add_argument(
        "--statistics",
        metavar="FILE",
        help="JSON file of an earlier import with the tokens of each expert, instead of --sample. It is "
        "DIR/router_statistics.json",
    )


def _import(options: Namespace) -> None:
    from titanlite.tools.convert.command import import_

    names = "path", "out", "model", "flavor", "config", "dtype", "allow_unexpected", "layers"
    of_experts = "experts", "sample", "sample_tokens", "statistics"
    import_(**{name: getattr(options, name) for name in (*names, *of_experts)})
