"""`titanlite checkpoint export`."""

from pathlib import Path

from titanlite.convert.source import open_source
from titanlite.convert.torch_file import write_torch_file
from titanlite.parallelize import DTYPES
from titanlite.runtime.errors import DamagedCheckpoint, RunError, UserError


def export(path: str, *, config: str | None, tokenizer: str | None, format: str, out: str, dtype: str | None) -> None:
    """Run the command with the options of its parser.

    Raises:
        UserError: a mistake in the input, or a damaged checkpoint.
        RunError: a disk or a store fails.
    """
    try:
        source = open_source(path, config=config, tokenizer=tokenizer)
        write_torch_file(source, Path(out), dtype=DTYPES[dtype] if dtype else None)
    except DamagedCheckpoint as damage:
        raise UserError(str(damage)) from None
    except BrokenPipeError:
        raise
    except OSError as error:  # of a disk, or of an object store after many tries
        raise RunError(str(error)) from None
    print(f"wrote {out}, the weights of {source.where}")
