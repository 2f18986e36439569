"""Arguments of `titanlite config migrate`."""

from argparse import Namespace
from pathlib import Path

from titanlite.tools.arguments import Parser, positive_int


def add_commands(config: Parser) -> None:
    """Add `config migrate`."""
    parser = config.add_command(
        "migrate",
        "translate a TOML file of torchtitan",
        _run,
        details=(
            "Prints the new config, or writes it with --out, and reports every key of the old one. Exit code 1 if\n"
            "the new config does not train as the old one did."
        ),
        example="config migrate old.toml --out new.toml --world-size 64",
    )
    parser.add_argument("old", metavar="OLD.toml", type=Path, help="config of torchtitan 0.1 or 0.2")
    parser.add_argument("--out", metavar="NEW.toml", type=Path, help="file to write; it must not exist")
    parser.add_argument(
        "--world-size",
        metavar="N",
        type=positive_int,
        help="processes of the run; torchtitan's batch sizes depend on it",
    )
    parser.add_argument(
        "--from", dest="version", choices=("0.1", "0.2"), help="version of torchtitan; default: by keys"
    )


def _run(options: Namespace) -> None:
    from titanlite.tools.migrate.command import main

    main(options.old, out=options.out, world_size=options.world_size, version=options.version)
