"""Arguments of `titanlite generate`."""

from argparse import ArgumentTypeError, Namespace
from functools import partial

from titanlite.tools.arguments import Parser, non_negative_int, positive_int
from titanlite.tools.convert.arguments import CHECKPOINT, add_source

DETAILS = """\
The text that the model adds goes to standard output as it comes, and nothing else does. By default each token is the
most probable one, so that the same command writes the same text. A text ends at the tokenizer's end-of-document token,
after --max-new-tokens, or at the model's max_seq_len, which a line on standard error reports.
"""
EXAMPLE = """\
generate outputs/debug --prompt "def add(a, b):"
generate outputs/debug --prompt-file prompts.txt --temperature 0.8 --top-p 0.95 --json
generate Qwen3-8B --chat --interactive --temperature 0.7"""


def add_commands(titanlite: Parser) -> None:
    """Add `generate`."""
    parser = titanlite.add_command(
        "generate",
        "continue a text with the weights of a checkpoint",
        lambda options: _run(parser, options),
        details=DETAILS.rstrip(),
        example=EXAMPLE,
    )
    add_source(parser, about=f"{CHECKPOINT}, or a Hugging Face folder")
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue")
    parser.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="a prompt on each line; of FILE.jsonl the field prompt or text of each line; - is standard input",
    )
    parser.add_argument("--interactive", action="store_true", help="read prompts from the terminal, a line each")
    parser.add_argument("--chat", action="store_true", help="prompts are messages: apply the tokenizer's chat template")
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=positive_int, default=256, help="longest answer; default: 256"
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=partial(_number, least=0.0, most=100.0),
        default=0.0,
        help="0 takes the most probable token; above, tokens are drawn, 1 with the model's probabilities; default: 0",
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=partial(_number, least=1e-6, most=1.0),
        default=None,
        help="draw among the most probable tokens that together have the probability P; default: all",
    )
    parser.add_argument(
        "--seed", metavar="S", type=non_negative_int, default=None, help="of the draws; each prompt uses it; default: 0"
    )
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default=None,
        help="of weights and matmuls; default: bfloat16 on GPUs, float32 on CPUs",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="a JSON object for each prompt: its text and answer, token counts, the end",
    )


def _number(text: str, *, least: float, most: float) -> float:
    """
    Raises:
        ArgumentTypeError: the text is no number in this range.
    """
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise ArgumentTypeError(f"expected a number from {least:g} to {most:g}, got {text!r}")
    return value


def _run(parser: Parser, options: Namespace) -> None:
    given = {
        "--prompt": options.prompt is not None,
        "--prompt-file": options.prompt_file is not None,
        "--interactive": options.interactive,
    }
    named = [name for name, is_given in given.items() if is_given]
    if not named:
        parser.error("no prompt: give --prompt TEXT, --prompt-file FILE or --interactive")
    if len(named) > 1:
        parser.error(f"{' and '.join(named)}: give one of them")
    if options.interactive and options.json:
        parser.error("--interactive and --json: give one of them")
    if options.prompt is not None and not options.prompt.strip():
        parser.error("--prompt: the prompt is empty")
    drawn = {"--top-p": options.top_p, "--seed": options.seed}
    useless = [name for name, value in drawn.items() if value is not None]
    if options.temperature == 0 and useless:
        parser.error(f"{useless[0]} does nothing at temperature 0: give --temperature too, such as --temperature 0.8")
    from titanlite.tools.convert.generate import Settings, main

    main(
        options.path,
        config=options.config,
        model_file=options.model_file,
        tokenizer=options.tokenizer,
        prompt=options.prompt,
        prompt_file=options.prompt_file,
        interactive=options.interactive,
        chat=options.chat,
        settings=Settings(options.max_new_tokens, options.temperature, options.top_p or 1.0, options.seed or 0),
        dtype=options.dtype,
        as_json=options.json,
    )
