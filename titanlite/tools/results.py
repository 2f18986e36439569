"""What the command shows after a complete run: text that a small model writes, the report, and what can follow."""

import logging
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from titanlite.metrics.run_summary import report_next
from titanlite.models.base import unique_parameters
from titanlite.models.registry import MODELS
from titanlite.runtime.errors import RunError, UserError
from titanlite.tools.convert.generation import Generator, Sampler, stream_text
from titanlite.tools.convert.prompts import stop_ids

if TYPE_CHECKING:
    from titanlite.train import Run

logger = logging.getLogger(__name__)

MOST_PARAMETERS = 100_000_000
"""Parameters of the largest model that writes a sample: it takes seconds on a CPU."""
GIVEN, NEW = 16, 96
"""Tokens of the prompt and of the sample."""
TEMPERATURE = 0.8


def show_results(run: "Run") -> None:
    """Report what can follow a run, and before it a sample and the path of the report where both take seconds only."""
    if _is_small(run):
        _show_sample(run)
        from titanlite.tools.report.page import check_page, page, read_run, write_page

        place = run.folder.path / "report.html"
        with suppress(UserError):  # what draws it is not installed
            check_page(place)
            write_page(place, page([read_run(run.folder.path)]))
            logger.info(f"report   {place}")
    steps = max(run.position.steps, run.position.progress.step)
    report_next(run.config, steps=steps, folder=run.folder, has_checkpoint=run.checkpoints.newest > 0)


def _is_small(run: "Run") -> bool:
    """Return True for a small model of titanlite's families in one process, not compiled."""
    parameters = sum(parameter.numel() for _, parameter in unique_parameters(run.model))
    has_cache = type(run.model) in MODELS.values() and not run.config.compile.enable
    return run.setup.ranks.world_size == 1 and parameters <= MOST_PARAMETERS and has_cache


def _show_sample(run: "Run") -> None:
    try:
        given, text = write_sample(run)
        logger.info(f'sample   after "{given}" the model writes, at temperature {TEMPERATURE}:')
        for line in text.splitlines():
            logger.info(f"           {line}")
    except (UserError, RunError) as error:
        logger.warning(f"no sample: {error}")


def write_sample(run: "Run") -> tuple[str, str]:
    """Return the beginning of a document, of the validation data if there are some, and how the model continues it."""
    tokenizer = run.setup.inputs.tokenizer
    source = (run.validator.sources or run.position.samples.sources)[0]
    prompt = source.read(0).tokens[:GIVEN]
    max_seq_len = run.setup.inputs.model.args.max_seq_len
    generator = Generator(
        run.model, kernels=run.setup.kernels, vocab_size=tokenizer.vocab_size, max_seq_len=max_seq_len
    )
    sampler = Sampler(temperature=TEMPERATURE, top_p=0.95)
    tokens = generator.stream(prompt.tolist(), max_new_tokens=NEW, sampler=sampler, stop_ids=stop_ids(tokenizer))
    given = tokenizer.decode(prompt[prompt != tokenizer.bos_id]).encode("unicode_escape").decode()
    return given, "".join(islice(stream_text(tokenizer, tokens, context=prompt.tolist()), NEW))
