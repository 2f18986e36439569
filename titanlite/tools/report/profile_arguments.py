"""Arguments of `titanlite profile`."""

from argparse import Namespace

from titanlite.tools.arguments import Parser, non_negative_int, positive_int


def add_commands(titanlite: Parser) -> None:
    """Add `profile`."""
    parser = titanlite.add_command(
        "profile",
        "print where the time of a profiled step went",
        _run,
        details=(
            "Read a trace that training with --profiling.enable_profiling wrote: compute, collectives and how much of\n"
            "them is hidden, idle time, operators. docs/see_the_run.md explains each line."
        ),
        example="profile outputs/debug\nprofile outputs/llama3_8b --step 200 --rank 7",
    )
    parser.add_argument("folder", metavar="RUN", help="folder of the run")
    parser.add_argument("--step", metavar="N", type=positive_int, help="last step of the window; default: the newest")
    parser.add_argument("--rank", metavar="R", type=non_negative_int, default=0, help="rank; default: 0")
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds of the whole window")


def _run(options: Namespace) -> None:
    from titanlite.tools.report.profile_command import main

    main(options.folder, step=options.step, rank=options.rank, as_json=options.json)
