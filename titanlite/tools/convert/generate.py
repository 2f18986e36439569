"""`titanlite generate`: continue prompts with the weights of a checkpoint, in one process."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Literal

import torch

from titanlite.data.tokenizer import Tokenizer
from titanlite.ops import pick_kernels
from titanlite.parallelize.fsdp import DTYPES
from titanlite.runtime.errors import UserError
from titanlite.runtime.process_group import Ranks, pick_device
from titanlite.tools.arguments import AnyWeights, Count, Index, ModelFile, RunConfig, RunTokenizer, between
from titanlite.tools.convert.generation import Generator, Sampler, stream_text
from titanlite.tools.convert.prompts import prompt_encoder, read_prompts, stop_ids
from titanlite.tools.convert.source import Source, default_dtype, load_model, note, open_source, tokenizer_of
from titanlite.tools.ingest.chat_template import Chat


def generate(
    path: AnyWeights,
    *,
    config: RunConfig | None = None,
    model_file: ModelFile | None = None,
    tokenizer: RunTokenizer | None = None,
    prompt: str | None = None,
    prompt_file: str | None = None,
    chat: bool = False,
    max_new_tokens: Count = 256,
    temperature: Annotated[float, between(0, 100)] = 0.0,
    top_p: Annotated[float, between(1e-6, 1)] | None = None,
    seed: Index | None = None,
    dtype: Literal["bfloat16", "float32"] | None = None,
    json_: bool = False,
) -> None:
    """Continue a text with the weights of a checkpoint.

    The text that the model adds goes to standard output as it comes, and nothing else does. By default each token is
    the most probable one, so that the same command writes the same text. A text ends at the tokenizer's end-of-document
    token, after --max-new-tokens, or at the model's max_seq_len, which a line on standard error reports.

    Args:
        prompt (TEXT): text to continue
        prompt_file (FILE): a prompt on each line; of FILE.jsonl the field prompt or text of each line; - is standard
            input or the terminal, where each line is answered as it comes
        chat: prompts are messages: apply the tokenizer's chat template
        max_new_tokens: longest answer
        temperature (T): 0 takes the most probable token; above, tokens are drawn, 1 with the model's probabilities;
            default: 0
        top_p (P): draw among the most probable tokens that together have the probability P; default: all
        seed (S): of the draws; each prompt uses it; default: 0
        dtype: of weights and matmuls; default: bfloat16 on GPUs, float32 on CPUs
        json_: a JSON object for each prompt: its text and answer, token counts, the end

    Raises:
        UserError: a prompt, the checkpoint or its tokenizer cannot be used.

    Example:
        outputs/debug --prompt "def add(a, b):"
        outputs/debug --prompt-file prompts.txt --temperature 0.8 --top-p 0.95 --json
        Qwen3-8B --chat --prompt-file - --temperature 0.7
    """
    useless = [name for name, value in {"--top-p": top_p, "--seed": seed}.items() if value is not None]
    problem = ""
    if (prompt is None) == (prompt_file is None):
        problem = "give --prompt TEXT or --prompt-file FILE" + (", and not both" if prompt is not None else "")
    elif prompt is not None and not prompt.strip():
        problem = "--prompt: the prompt is empty"
    elif temperature == 0 and useless:
        problem = f"{useless[0]} does nothing at temperature 0: give --temperature too, such as --temperature 0.8"
    if problem:
        raise UserError(f"titanlite generate: {problem}")
    texts = read_prompts(prompt, prompt_file)
    if prompt_file != "-":  # else each line is answered before the next one is read
        texts = [*texts]
    source = open_source(path, config=config, tokenizer=tokenizer, model_file=model_file)
    known = tokenizer_of(source)
    encode = prompt_encoder(known, config=source.config, chat=Chat(known) if chat else None)
    prompts = ((text, encode(text)) for text in texts)
    if prompt_file != "-":
        prompts = [*prompts]
    device = pick_device(Ranks(0, 1, 0, 1))
    generator = load_generator(source, vocab_size=known.vocab_size, device=device, dtype=dtype)
    if isinstance(prompts, list):
        for _, ids in prompts:
            generator.check(ids)  # before the first answer, which may take minutes
    sampler = partial(Sampler, temperature=temperature, top_p=top_p or 1.0, seed=seed or 0)
    answers = Answers(generator, known, max_new_tokens=max_new_tokens, sampler=sampler)
    for number, (text, ids) in enumerate(prompts):
        if json_:
            added = "".join(answers.stream(ids))
            print(json.dumps({"prompt": text, "text": added, **answers.about()}, ensure_ascii=False), flush=True)
            continue
        if number:
            print("---")
        answers.show(ids)


def load_generator(source: Source, *, vocab_size: int, device: torch.device, dtype: str | None = None) -> Generator:
    """Load the weights.

    Args:
        vocab_size: of the tokenizer.
        dtype: default: bfloat16 on GPUs, float32 on CPUs.
    """
    chosen = DTYPES[dtype or default_dtype(device)]
    return Generator(
        load_model(source, dtype=chosen, device=device),
        kernels=pick_kernels(device),
        vocab_size=vocab_size,
        max_seq_len=source.spec.args.max_seq_len,
    )


class Answers:
    """Texts that the model adds to prompts.

    Args:
        sampler: makes the sampler of an answer. Each draws with the same seed, so that no answer depends on others.
    """

    def __init__(
        self, generator: Generator, tokenizer: Tokenizer, *, max_new_tokens: int, sampler: Callable[[], Sampler]
    ) -> None:
        self.generator = generator
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.sampler = sampler
        self.stops = stop_ids(tokenizer)
        self._prompt_length = self._count = 0

    def stream(self, ids: list[int]) -> Iterator[str]:
        """Yield the text after a prompt."""
        self._prompt_length, self._count = len(ids), 0
        tokens = self.generator.stream(
            ids, max_new_tokens=self.max_new_tokens, sampler=self.sampler(), stop_ids=self.stops
        )
        yield from stream_text(self.tokenizer, self._counted(tokens), context=ids)

    def _counted(self, tokens: Iterator[int]) -> Iterator[int]:
        for token in tokens:
            self._count += 1
            yield token

    def about(self) -> dict[str, int | str]:
        """Return the counts of tokens of the last answer, and why it ended."""
        if self._count == self.max_new_tokens:
            ended = "max_new_tokens"
        elif self._prompt_length + self._count == self.generator.max_seq_len:
            ended = "max_seq_len"
        else:
            ended = "end of text"
        return {"prompt_tokens": self._prompt_length, "new_tokens": self._count, "ended": ended}

    def show(self, ids: list[int]) -> None:
        """Write an answer to standard output as it comes."""
        try:
            for piece in self.stream(ids):
                print(piece, end="", flush=True)
        finally:
            print(flush=True)
        if self.about()["ended"] == "max_seq_len":
            note(f"stopped: the model's max_seq_len of {self.generator.max_seq_len:,} tokens is reached")
