"""Continue a sequence of tokens with a model: draw one token at a time, and turn the tokens into text as they come."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titanlite.data.tokenizer import Tokenizer
from titanlite.models.base import Model
from titanlite.models.registry import MODELS
from titanlite.ops.kernels import Kernels
from titanlite.runtime.errors import RunError, UserError
from titanlite.tools.convert.key_value_cache import KeyValueCache

INCOMPLETE = "\ufffd"
"""Character that decoders put in place of bytes that are no whole character."""


def token_probabilities(logits_V: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """Return the probabilities from which the next token is drawn: float32 [V], sum 1.

    Args:
        temperature: above 0. Logits are divided by it.
        top_p: probability kept (arXiv:1904.09751). The fewest tokens that together have at least that are kept, the
            most probable first. Tokens of equal probability are kept in the order of their ids.
    """
    probabilities_V = (logits_V.float() / temperature).softmax(dim=-1)
    if top_p >= 1:
        return probabilities_V
    sorted_V, order_V = probabilities_V.sort(descending=True, stable=True)
    before_V = sorted_V.cumsum(-1) - sorted_V
    kept_V = torch.zeros_like(probabilities_V).scatter(-1, order_V, sorted_V.masked_fill(before_V >= top_p, 0.0))
    return kept_V / kept_V.sum()


def is_family(model: Model) -> bool:
    """Return whether a model is of a family of titanlite, and not of the user's own."""
    return type(model) in MODELS.values()


@dataclass
class Sampler:
    """Draws tokens. The same seed draws the same tokens from the same probabilities, on every device."""

    temperature: float = 0.0
    """0 takes the most probable token; of several, that with the lowest id."""
    top_p: float = 1.0
    seed: int = 0
    _generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def draw(self, logits_V: Tensor) -> int:
        """Return the id of a token."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        probabilities_V = token_probabilities(logits_V, temperature=self.temperature, top_p=self.top_p)
        uniform = torch.rand((), generator=self._generator, dtype=torch.float64).item()
        ends_V = probabilities_V.double().cumsum(-1)
        # The last end is not exactly 1. `right` passes by tokens of probability 0, whose end is that of the one before.
        return int(torch.searchsorted(ends_V, ends_V[-1] * uniform, right=True))


class Generator:
    """Continues sequences of tokens.

    Args:
        model: with its weights, and with the kernels of the device.
        vocab_size: tokens to choose among. The model may have more: vocabularies are padded.
        max_seq_len: longest sequence that the model can compute.
        use_cache: keep keys and values. False computes the whole sequence for each token. Default: of the families of
            titanlite. Another model may attend without `key_source`, or place tokens without `documents`.
    """

    def __init__(
        self, model: Model, *, kernels: Kernels, vocab_size: int, max_seq_len: int, use_cache: bool | None = None
    ) -> None:
        self.model = model.eval()
        self.kernels = kernels
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.device = next(model.parameters()).device
        self._cache = KeyValueCache(model) if use_cache or (use_cache is None and is_family(model)) else None
        self.is_full = False
        """Whether the last sequence has ended at `max_seq_len`."""

    def stream(
        self, prompt: Sequence[int], *, max_new_tokens: int, sampler: Sampler, stop_ids: Collection[int] = ()
    ) -> Iterator[int]:
        """Yield new tokens, until one of `stop_ids`, which is not yielded, or until `max_seq_len`.

        Raises:
            UserError: the prompt is empty, or leaves no room for a token.
        """
        self.check(prompt)
        ids, self.is_full = list(prompt), False
        if self._cache:
            self._cache.clear()
        for _ in range(min(max_new_tokens, self.max_seq_len - len(prompt))):
            token = sampler.draw(self.next_logits(ids))
            if token in stop_ids:
                return
            ids.append(token)
            yield token
        self.is_full = len(ids) == self.max_seq_len and len(ids) - len(prompt) < max_new_tokens

    def check(self, prompt: Sequence[int]) -> None:
        """
        Raises:
            UserError: a prompt is empty, or leaves no room for a token.
        """
        if not prompt:
            raise UserError("the prompt is empty, and the tokenizer has no token that begins a document")
        if len(prompt) >= self.max_seq_len:
            raise UserError(
                f"the prompt has {len(prompt):,} tokens, and the model's max_seq_len is {self.max_seq_len:,}: "
                "shorten the prompt"
            )

    @torch.inference_mode()
    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits of the token after a sequence: float32 [V]. It begins with the tokens in the cache."""
        tokens_BL = torch.tensor([ids[self._cache.length if self._cache else 0 :]], device=self.device)
        documents = self._cache.next_documents(tokens_BL) if self._cache else None
        more: dict[str, Any] = {} if documents is None else {"documents": documents}
        logits_V = self.model(tokens_BL, loss=self._last_logits, **more)
        if logits_V.isnan().any():
            raise RunError("the model's logits are NaN: its weights are damaged, or too large for this dtype")
        return logits_V

    def _last_logits(self, hidden_BLD: Tensor, weight_VD: Tensor) -> Tensor:
        """Compute no logits of other tokens than the last: of a long prompt they would take gigabytes."""
        return self.kernels.linear(hidden_BLD[0, -1:], weight_VD)[0, : self.vocab_size].float()


def stream_text(tokenizer: Tokenizer, tokens: Iterator[int], *, context: Sequence[int] = ()) -> Iterator[str]:
    """Yield the text of tokens as they come. Bytes of a character wait until the character is whole.

    Each piece is decoded together with the tokens before it: some tokenizers drop the space at the start of a text.

    Args:
        context: last tokens before these.
    """
    ids = list(context)[-4:]
    start, done = 0, len(ids)
    for token in tokens:
        ids.append(token)
        known, text = (tokenizer.decode(np.array(part)) for part in (ids[start:done], ids[start:]))
        if len(text) > len(known) and not text.endswith(INCOMPLETE):
            yield text[len(known) :]
            start, done = done, len(ids)
    if done < len(ids):
        yield tokenizer.decode(np.array(ids[start:]))[len(tokenizer.decode(np.array(ids[start:done]))) :]
