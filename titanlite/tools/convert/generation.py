"""Continue a sequence of tokens with a model: draw one token at a time, and turn the tokens into text as they come."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlite.data.tokenizer import Tokenizer
from titanlite.models.base import Model
from titanlite.models.decoder import Decoder
from titanlite.models.registry import MODELS
from titanlite.ops.attention import AttentionMask, Documents, Scores, SequencePart
from titanlite.ops.kernels import Kernels
from titanlite.runtime.errors import RunError, UserError

INCOMPLETE = "\ufffd"
"""Character that decoders put in place of bytes that are no whole character."""
NOT_FINITE = "the model's logits are NaN or overflow: its weights are damaged, or too large for this dtype"
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""cuDNN is left out, because it makes a plan for each number of keys, which takes longer than all else for a token."""


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

    A family of titanlite keeps keys and values. A model of the user's own may attend without `key_source`, or place
    tokens without `documents`, so that it computes the whole sequence for each token.
    """

    def __init__(self, model: Model, *, kernels: Kernels, vocab_size: int, max_seq_len: int) -> None:
        self.model = model.eval()
        self.kernels = kernels
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.device = next(model.parameters()).device
        self._cache = KeyValueCache(model) if type(model) in MODELS.values() else None
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
        """Check that a prompt can be continued.

        Raises:
            UserError: it is empty, or leaves no room for a token.
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
        with sdpa_kernel(BACKENDS):
            logits_V = self.model(tokens_BL, loss=self._last_logits, **more)
        if not logits_V.max().isfinite():  # the model may exclude tokens by logits of -inf
            raise RunError(NOT_FINITE)
        return logits_V

    def _last_logits(self, hidden_BLD: Tensor, weight_VD: Tensor) -> Tensor:
        """Return the logits of the last token. Those of all tokens of a long prompt would take gigabytes."""
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


# Keys and values of past tokens. Attention calls `self.kernels.attend` with the queries, keys and values of the new
# tokens, and with its `key_source`, which adds the keys and values of the tokens before.
# Shape suffixes: see `models/layers.py`; S all tokens so far, of which L are new, G query heads of one key head.


class LayerCache:
    """Keys and values of all tokens so far, of one attention layer.

    Args:
        window: tokens that a token sees, itself included. None: all before it.
    """

    part: SequencePart | None = None
    keys_BKSH: Tensor | None = None
    values_BKSH: Tensor | None = None

    def __init__(self, window: int | None = None) -> None:
        self.window = window

    def attend(
        self,
        kernels: Kernels,
        q_BNLH: Tensor,
        k_BKLH: Tensor,
        v_BKLH: Tensor,
        mask: AttentionMask | None,
        scores: Scores,
    ) -> Tensor:
        """Compute the causal attention of the new tokens, the first ones or one more, to all tokens so far -> [B, N, L,
        H].

        Args:
            mask: of the first tokens. That of one more is ignored, as it knows no others.
        """
        if self.keys_BKSH is None or self.values_BKSH is None:
            self.keys_BKSH, self.values_BKSH = k_BKLH, v_BKLH
            return kernels.attend(q_BNLH, k_BKLH, v_BKLH, mask, scores=scores)
        assert k_BKLH.shape[2] == 1
        self.keys_BKSH = torch.cat([self.keys_BKSH, k_BKLH], dim=2)
        self.values_BKSH = torch.cat([self.values_BKSH, v_BKLH], dim=2)
        if self.window is not None:
            self.keys_BKSH = self.keys_BKSH[:, :, -self.window :]
            self.values_BKSH = self.values_BKSH[:, :, -self.window :]
        if scores.sinks_N is not None:
            mask = q_BNLH.new_zeros(1, 1, 1, self.keys_BKSH.shape[2])
            return kernels.attend(q_BNLH, self.keys_BKSH, self.values_BKSH, mask, scores=scores)
        return attend_to_all(q_BNLH, self.keys_BKSH, self.values_BKSH, scores.scale)


def attend_to_all(q_BN1H: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, scale: float | None) -> Tensor:
    """Compute the attention of one token to all keys -> [B, N, 1, H].

    The query heads of a key head take the place of a sequence. So keys are not repeated, and no backend needs to know
    groups.
    """
    q_BKGH = q_BN1H.unflatten(1, (k_BKSH.shape[1], -1)).squeeze(3)
    return F.scaled_dot_product_attention(q_BKGH, k_BKSH, v_BKSH, scale=scale).flatten(1, 2).unsqueeze(2)


class KeyValueCache:
    """Caches of all layers of a model, for sequences that grow.

    Args:
        model: its attention layers get a key source, and layers with a state keep it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[LayerCache] = []
        self._states: list[dict[str, Tensor]] = []
        blocks = zip(model.layers, model.attentions, strict=False) if isinstance(model, Decoder) else ()
        windows = {module: attention.window for block, attention in blocks for module in block.modules()}
        for module in model.modules():
            if hasattr(module, "past"):
                self._states.append({})
                module.past = self._states[-1]  # pyright: ignore[reportArgumentType]
            elif hasattr(module, "key_source"):
                self._layers.append(LayerCache(windows.get(module)))
                module.key_source = self._layers[-1]  # pyright: ignore[reportArgumentType]
        self.length = 0
        """Tokens of which keys and values are kept."""

    def next_documents(self, tokens_BL: Tensor) -> Documents | None:
        """Return the positions of the next tokens; None at the beginning, as in training.

        The caller runs the model on these tokens next.
        """
        start, (B, L) = self.length, tokens_BL.shape
        self.length += L
        if start == 0:
            return None
        device = tokens_BL.device
        return Documents(
            torch.arange(start, start + L, device=device).expand(B, L),
            torch.zeros(B, L, dtype=torch.int32, device=device),
            torch.arange(0, B * L + 1, L, dtype=torch.int32, device=device),
        )

    def clear(self) -> None:
        """Forget all tokens."""
        self.length = 0
        for layer in self._layers:
            layer.keys_BKSH = layer.values_BKSH = None
        for state in self._states:
            state.clear()
