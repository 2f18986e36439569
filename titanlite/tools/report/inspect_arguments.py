"""Arguments of `titanlite inspect`."""

from argparse import Namespace
from pathlib import Path

from titanlite.tools.arguments import Parser, non_negative_int, positive_int

DETAILS = """\
A config: what the techniques do with each parameter on one rank. The table has shapes, placement, dtypes, FSDP unit,
recompute policy, compile, float8, adapters, optimizer and bytes. The ranks are not real, and no GPU is needed.
A checkpoint, or a run (its newest one): which ranks' files hold which tensors, and that they hold each element exactly
once. Exit code 2 if not. `checkpoint verify` also reads every byte.
With --memory, a run: memory by phase as its first steps measured it, beside that of a plan of its config."""


def add_commands(titanlite: Parser) -> None:
    """Add `inspect`."""
    parser = titanlite.add_command(
        "inspect",
        "show what each rank holds: of a config, or in a checkpoint",
        lambda options: _run(parser, options),
        details=DETAILS,
        example=(
            "inspect llama3_8b --world-size 64\n"
            "inspect my.toml --world-size 8 --rank 7 --json\n"
            "inspect outputs/debug\n"
            "inspect outputs/debug/checkpoints/step-00000100 --all\n"
            "inspect outputs/debug --memory"
        ),
    )
    parser.add_config()
    parser.add_argument(
        "--world-size",
        metavar="N",
        type=positive_int,
        help="processes; default: as many as the config's degrees ask for",
    )
    parser.add_argument("--rank", metavar="R", type=non_negative_int, help="rank to show; default: 0")
    parser.add_argument("--all", action="store_true", help="show every block, also those that are alike")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="of a run: memory by phase as its first steps measured it, and the plan's",
    )
    parser.add_argument(
        "--run-config", metavar="FILE", help="with --memory: config of a run whose own names code; default: its own"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with every parameter or tensor")


def _run(parser: Parser, options: Namespace) -> None:
    if not options.config:
        parser.error("name a config, a run or a checkpoint; see titanlite inspect --help")
    stored = options.config_word or options.config  # not the name of a file: an address would lose a slash
    if options.memory:
        _run_memory(parser, options, stored)
        return
    if "://" in stored or Path(options.config).is_dir():
        named = {"--world-size": options.world_size, "--rank": options.rank}
        if unused := [name for name, value in named.items() if value is not None] + options.overrides:
            parser.error(f"{unused[0]} is for a config, and {stored} is a run or a checkpoint")
        from titanlite.tools.report.inspect_command import inspect_checkpoint

        inspect_checkpoint(stored, whole=options.all, as_json=options.json)
        return
    if options.world_size is not None and (options.rank or 0) >= options.world_size:
        parser.error(f"--rank {options.rank}: there are ranks 0 to {options.world_size - 1}")
    from titanlite.tools.report.inspect_command import inspect_config

    inspect_config(
        options.config,
        options.overrides,
        world_size=options.world_size,
        rank=options.rank or 0,
        whole=options.all,
        as_json=options.json,
    )


def _run_memory(parser: Parser, options: Namespace, path: str) -> None:
    if not Path(path).is_dir():
        parser.error(f"--memory is for the folder of a run, and {path} is none")
    named = {"--world-size": options.world_size, "--rank": options.rank, "--all": options.all or None}
    if unused := [name for name, value in named.items() if value is not None] + options.overrides:
        parser.error(f"{unused[0]} and --memory exclude each other")
    from titanlite.tools.report.run_memory import print_memory

    print_memory(Path(path), config=options.run_config, as_json=options.json)
