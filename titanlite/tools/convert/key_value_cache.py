"""Keys and values of past tokens: `KeySource`s of attention layers.

Attention calls `self.kernels.attend` with the queries, keys and values of the new tokens, and with its `key_source`,
which adds the keys and values of the tokens before.

Shape suffixes: see `models/layers.py`; S all tokens so far, of which L are new, G query heads of one key head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.ops.attention import AttentionMask, Documents, SequencePart
from titanlite.ops.kernels import Kernels


class LayerCache:
    """Keys and values of all tokens that one attention layer has attended to.

    Args:
        window: tokens that a token sees, itself included. None: all before it.
    """

    part: SequencePart | None = None
    keys_BKSH: Tensor | None = None
    values_BKSH: Tensor | None = None

    def __init__(self, window: int | None = None) -> None:
        self.window = window

    def attend(
        self, kernels: Kernels, q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, mask: AttentionMask | None
    ) -> Tensor:
        """Causal attention of the new tokens, the first ones or one more, to all tokens so far -> [B, N, L, H].

        Args:
            mask: of the first tokens. That of one more is ignored, as it knows no others.
        """
        if self.keys_BKSH is None or self.values_BKSH is None:
            self.keys_BKSH, self.values_BKSH = k_BKLH, v_BKLH
            return kernels.attend(q_BNLH, k_BKLH, v_BKLH, mask)
        assert k_BKLH.shape[2] == 1
        self.keys_BKSH = torch.cat([self.keys_BKSH, k_BKLH], dim=2)
        self.values_BKSH = torch.cat([self.values_BKSH, v_BKLH], dim=2)
        if self.window is not None:
            self.keys_BKSH = self.keys_BKSH[:, :, -self.window :]
            self.values_BKSH = self.values_BKSH[:, :, -self.window :]
        return attend_to_all(q_BNLH, self.keys_BKSH, self.values_BKSH)


def attend_to_all(q_BN1H: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
    """Attention of one token to all keys -> [B, N, 1, H].

    The query heads of a key head take the place of a sequence. So keys are not repeated, and no backend needs to know
    groups.
    """
    q_BKGH = q_BN1H.unflatten(1, (k_BKSH.shape[1], -1)).squeeze(3)
    return F.scaled_dot_product_attention(q_BKGH, k_BKSH, v_BKSH).flatten(1, 2).unsqueeze(2)


class KeyValueCache:
    """Caches of all layers of a model, for sequences that grow.

    Args:
        model: its attention layers get a key source.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[LayerCache] = []
        for module in model.modules():
            if hasattr(module, "key_source"):
                self._layers.append(LayerCache(getattr(module, "window", None)))
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
