"""`titanlite generate`: continue prompts with the weights of a checkpoint, in one process."""

from typing import Annotated, Literal

from titanlite.data.tokenizer import Tokenizer
from titanlite.models.base import Model
from titanlite.ops import pick_kernels
from titanlite.parallelize.fsdp import DTYPES
from titanlite.runtime.errors import UserError
from titanlite.runtime.process_group import Ranks, pick_device
from titanlite.tools.arguments import AnyWeights, Count, Index, ModelFile, OfAverage, RunConfig, RunTokenizer, between
from titanlite.tools.convert.generation import Generator, Sampler, stream_text
from titanlite.tools.convert.prompts import prompt_encoder, read_prompts, stop_ids
from titanlite.tools.convert.source import OpenedWeights, default_dtype, load_model, note, open_source, tokenizer_of
from titanlite.tools.ingest.chat_template import Chat


def generate(
    path: AnyWeights,
    *,
    config: RunConfig | None = None,
    model_file: ModelFile | None = None,
    tokenizer: RunTokenizer | None = None,
    average: OfAverage = False,
    prompt: str | None = None,
    prompt_file: str | None = None,
    chat: bool = False,
    max_new_tokens: Count = 256,
    temperature: Annotated[float, between(0, 100)] = 0.0,
    top_p: Annotated[float, between(1e-6, 1)] | None = None,
    seed: Index | None = None,
    dtype: Literal["bfloat16", "float32"] | None = None,
) -> None:
    """Continue a text with the weights of a checkpoint.

    The text that the model adds goes to standard output as it comes, and nothing else does. By default each token is
    the most probable one, so that the same command writes the same text. A text ends at the tokenizer's end-of-document
    token, after --max-new-tokens, or at the model's max_seq_len, which a line on standard error reports.

    Args:
        prompt (TEXT): text to continue
        prompt_file (FILE): a prompt on each line; - is standard input or the terminal, where each line is answered as
            it comes
        chat: prompts are messages: apply the tokenizer's chat template
        max_new_tokens: longest answer
        temperature (T): 0 takes the most probable token; above, tokens are drawn, 1 with the model's probabilities;
            default: 0
        top_p (P): draw among the most probable tokens that together have the probability P; default: all
        seed (S): of the draws; each prompt uses it; default: 0
        dtype: of weights and matmuls; default: bfloat16 on GPUs, float32 on CPUs

    Raises:
        UserError: a prompt, the checkpoint or its tokenizer cannot be used.

    Example:
        outputs/debug --prompt "def add(a, b):"
        outputs/debug --prompt-file prompts.txt --temperature 0.8 --top-p 0.95
        Qwen3-8B --chat --prompt-file - --temperature 0.7
    """
    useless = [name for name, value in {"--top-p": top_p, "--seed": seed}.items() if value is not None]
    problem = ""
    if (prompt is None) == (prompt_file is None):
        problem = "give --prompt TEXT or --prompt-file FILE" + (", and not both" if prompt is not None else "")
    elif temperature == 0 and useless:
        problem = f"{useless[0]} does nothing at temperature 0: give --temperature too, such as --temperature 0.8"
    if problem:
        raise UserError(f"titanlite generate: {problem}")
    texts = read_prompts(prompt, prompt_file)
    if prompt_file != "-":  # a line of standard input is answered before the next one is read
        texts = [*texts]
    source = open_source(path, config=config, tokenizer=tokenizer, model_file=model_file, average=average)
    known = tokenizer_of(source)
    encode = prompt_encoder(known, config=source.config, chat=Chat(known) if chat else None)
    prompts = map(encode, texts)
    if prompt_file != "-":
        prompts = [*prompts]
    generator = generator_of(source, known, load_here(source, dtype=dtype))
    if isinstance(prompts, list):
        for ids in prompts:
            generator.check(ids)  # the first answer may take minutes
    stops = stop_ids(known)
    for number, ids in enumerate(prompts):
        if number:
            print("---")
        # Each prompt draws with the same seed, so that no answer depends on others.
        sampler = Sampler(temperature=temperature, top_p=top_p or 1.0, seed=seed or 0)
        tokens = generator.stream(ids, max_new_tokens=max_new_tokens, sampler=sampler, stop_ids=stops)
        try:
            for piece in stream_text(known, tokens, context=ids):
                print(piece, end="", flush=True)
        finally:
            print(flush=True)
        if generator.is_full:
            note(f"stopped: the model's max_seq_len of {generator.max_seq_len:,} tokens is reached")


def load_here(source: OpenedWeights, *, dtype: str | None = None) -> Model:
    """Return the model with its weights, on the device of this process."""
    device = pick_device(Ranks(0, 1, 0, 1))
    return load_model(source, dtype=DTYPES[dtype or default_dtype(device)], device=device)


def generator_of(source: OpenedWeights, tokenizer: Tokenizer, model: Model) -> Generator:
    """Return a generator of texts with a model that has the weights."""
    return Generator(
        model,
        kernels=pick_kernels(next(model.parameters()).device),
        vocab_size=tokenizer.vocab_size,
        max_seq_len=source.spec.args.max_seq_len,
    )
