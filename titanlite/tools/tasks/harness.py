"""A checkpoint as a model of EleutherAI's lm-evaluation-harness, whose package `lm_eval` this imports."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
)

from titanlite.data.loader import to_device
from titanlite.data.tokenizer import Tokenizer
from titanlite.models.base import Model
from titanlite.ops.kernels import Kernels
from titanlite.runtime.errors import RunError, UserError
from titanlite.tasks import Answer, Question, Scorer, Task
from titanlite.tools.convert.generation import NOT_FINITE, Generator, Sampler, stream_text
from titanlite.tools.convert.prompts import stop_ids


class CheckpointLM(TemplateLM):
    """Model of the harness that computes with titanlite's model and tokenizer.

    Args:
        model: with its weights, on its device.
        opening: tokens that begin a text.
        seq_len: tokens of the longest sequence, the `max_length` of the harness.
    """

    def __init__(
        self,
        model: Model,
        *,
        tokenizer: Tokenizer,
        opening: Sequence[int],
        kernels: Kernels,
        seq_len: int,
        batch_size: int,
    ) -> None:
        super().__init__()
        self._device = next(model.parameters()).device  # the harness reads it by this name
        self.model = model.eval()
        self.text_tokenizer, self.opening = tokenizer, [*opening]
        self.kernels, self.seq_len, self.sequences = kernels, seq_len, batch_size

    @property
    def eot_token_id(self) -> int | None:
        return self.text_tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int | None:
        bos = self.text_tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        opening = self.opening if add_special_tokens is None else []
        return [*opening, *self.text_tokenizer.encode(string).tolist()]

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(np.array((context + answer)[-(self.seq_len + 1) :]), len(answer)) for _, context, answer in requests]
        questions = [Question([Answer(*pair)], [""], 0) for pair in pairs]
        scorer = Scorer(
            [Task("", [], is_choice=False, questions=questions)],
            seq_len=self.seq_len,
            batch_size=self.sequences,
            kernels=self.kernels,
            device=self._device,
        )
        for measure, batch in scorer.batches():
            measure(self.model, to_device(batch, self._device))
        if not scorer.scores.isfinite().all():
            raise RunError(NOT_FINITE)
        return [(-nats, misses == 0) for nats, misses in scorer.scores.tolist()]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, each token once, in windows of `seq_len` tokens."""
        found = []
        for (text,) in (request.args for request in requests):
            tokens, prefix = self.tok_encode(text, add_special_tokens=False), self.prefix_token_id
            windows = get_rolling_token_windows(tokens, prefix, max_seq_len=self.seq_len, context_len=1)
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(likelihood for likelihood, _ in self._loglikelihood_tokens(pairs)))
        return found

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        vocabulary = self.text_tokenizer.vocab_size
        generator = Generator(self.model, kernels=self.kernels, vocab_size=vocabulary, max_seq_len=self.seq_len)
        found = []
        for context, options in (request.args for request in requests):
            room = min(options.get("max_gen_toks", 256), self.seq_len - 1)
            prompt = self.tok_encode(context)[-(self.seq_len - room) :]
            sampler = Sampler(options.get("temperature", 0.0) if options.get("do_sample") else 0.0)
            tokens = generator.stream(
                prompt, max_new_tokens=room, sampler=sampler, stop_ids=stop_ids(self.text_tokenizer)
            )
            until = options.get("until") or []
            text, until = "", [until] if isinstance(until, str) else until
            for piece in stream_text(self.text_tokenizer, tokens, context=prompt):
                text += piece
                if any(stop in text for stop in until):
                    break
            found.append(min((text.split(stop)[0] for stop in until), key=len, default=text))
        return found


def evaluate_tasks(model: CheckpointLM, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the metrics of tasks that the harness has, by name, and the number of their questions.

    A task may read answers by several filters, each with metrics of its own: exact_match,strict-match.

    Raises:
        UserError: the harness has no such task, or cannot load it.
        RunError: logits of the model are not finite.
    """
    try:
        results = simple_evaluate(model=model, tasks=[*names], bootstrap_iters=100)
    except RunError:
        raise
    except Exception as error:  # the harness, a data set or the network may fail
        raise UserError(f"--lm-eval: {type(error).__name__}: {' '.join(str(error).split())}") from error
    assert results is not None
    counts = {name: sizes["effective"] for name, sizes in results["n-samples"].items()}
    return {
        name: {
            **{key.removesuffix(",none"): value for key, value in metrics.items() if "," in key and value != "N/A"},
            "questions": counts.get(name, 0),
        }
        for name, metrics in results["results"].items()
    }
