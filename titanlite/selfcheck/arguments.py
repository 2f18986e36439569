"""Option of `titanlite check` that tests the machines."""

from argparse import ArgumentParser

DETAILS = """\
The number of processes is taken from the environment variable WORLD_SIZE; default: 1.

With --machines, the processes test what the run needs, in a minute or two. They test collectives and their bandwidths,
the checkpoint folder, clocks, disk, memory, versions and devices. Exit code 2 if a test fails. ./run_train.sh check
does it on all processes of a job."""


def add_machines(parser: ArgumentParser) -> None:
    """Add `--machines` to a parser of `check`."""
    parser.add_argument("--machines", action="store_true", help="test the machines too, on all processes of the job")
