"""Arguments of `titanlite checkpoint`."""

from argparse import Namespace

from titanlite.tools.arguments import Parser, non_negative_int, positive_int

PATH = "folder of a run, of its checkpoints (or their URL: s3://...), of several runs, or one checkpoint"


def add_commands(titanlite: Parser) -> Parser:
    """Add `checkpoint list|verify|restore|show|prune`, and return the group, to which other tools add commands."""
    group = titanlite.add_command("checkpoint", "list, verify, show, export and delete checkpoints")
    parser = group.add_command(
        "list",
        "list checkpoints with age, size and state",
        _run,
        example="checkpoint list\ncheckpoint list s3://bucket/run",
    )
    parser.add_argument("path", metavar="PATH", nargs="?", default="outputs", help=f"{PATH}; default: outputs")
    parser = group.add_command(
        "verify",
        "read every byte of checkpoints and compare checksums",
        _run,
        details="Exit code 2 if a checkpoint is damaged. `checkpoint list` shows the result from then on.",
        example="checkpoint verify outputs/debug",
    )
    parser.add_argument("path", metavar="PATH", help=PATH)
    parser = group.add_command(
        "restore",
        "let quarantined checkpoints count again, if they are whole",
        _run,
        details="Every byte is read. A start with bad memory may have found damage where there is none.",
        example="checkpoint restore outputs/debug/checkpoints/step-00000100",
    )
    parser.add_argument("path", metavar="PATH", help=PATH)
    parser = group.add_command(
        "show",
        "print the manifest of a checkpoint",
        _run,
        details="Of several checkpoints, the newest complete one is shown.",
        example="checkpoint show outputs/debug --tensors",
    )
    parser.add_argument("path", metavar="PATH", help=PATH)
    parser.add_argument("--tensors", action="store_true", help="also list every tensor with its shape and dtype")
    parser = group.add_command(
        "prune",
        "delete older checkpoints of a run",
        _run,
        details="Nothing is deleted if the newest checkpoint is damaged. The run may continue meanwhile.",
        example="checkpoint prune outputs/debug --keep-latest-k 3 --keep-every 1000 --dry-run",
    )
    parser.add_argument("path", metavar="PATH", help=PATH)
    parser.add_argument(
        "--keep-latest-k", metavar="K", type=positive_int, required=True, help="keep the newest K checkpoints"
    )
    parser.add_argument(
        "--keep-every", metavar="N", type=non_negative_int, default=0, help="also keep steps divisible by N"
    )
    parser.add_argument("--quarantined", action="store_true", help="also delete quarantined checkpoints")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    return group


def _run(options: Namespace) -> None:
    from titanlite.tools.checkpoints.command import main

    names = "path", "tensors", "keep_latest_k", "keep_every", "quarantined", "dry_run"
    main(options.command, **{name: value for name, value in vars(options).items() if name in names})
