"""Training loss of each source of the data (`metrics.loss_by_source`).

A sequence comes from one source. The loss function adds two sums for each source to the loss's metrics: cross entropy
and tokens. They are summed over ranks with the loss itself, so there is no further collective.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titanlite.batch import IGNORE
from titanlite.loss import TokenLoss
from titanlite.runtime.errors import UserError

NATS, TOKENS = "source_nats/", "source_tokens/"
"""Beginnings of the names of both sums. The name of the source follows."""


class LossBySource:
    """Loss function that also sums the cross entropy and the tokens of each source.

    Args:
        loss: `token_loss`, with its settings.
        names: of the sources, by number.
    """

    def __init__(self, loss: Any, names: Sequence[str]) -> None:
        self.loss = loss
        self.names = names

    def __call__(
        self,
        hidden_BLD: Tensor,
        weight_VD: Tensor,
        /,
        *,
        labels_BL: Tensor,
        sources_B: Tensor | None = None,
        **further: Any,
    ) -> TokenLoss:
        """Return what `loss` returns, with both sums of each source among the metrics."""
        loss: TokenLoss = self.loss(hidden_BLD, weight_VD, labels_BL=labels_BL, **further)
        assert sources_B is not None, "batches have them (Samples.number_sources)"
        if loss.cross_entropy_T is None:
            raise UserError("metrics.loss_by_source: training.loss returns no cross_entropy_T (docs/extend.md): add it")
        sums_B2 = torch.stack(
            [loss.cross_entropy_T.view_as(labels_BL).sum(1), (labels_BL != IGNORE).sum(1).float()], dim=1
        )
        numbers_S = torch.arange(len(self.names), device=sources_B.device)
        of_source_SB = numbers_S[:, None] == sources_B
        sums_S2 = torch.where(of_source_SB[:, :, None], sums_B2, 0.0).sum(1)
        metrics = {
            f"{prefix}{name}": sums_S2[number, column]
            for column, prefix in enumerate((NATS, TOKENS))
            for number, name in enumerate(self.names)
        }
        return loss._replace(metrics={**loss.metrics, **metrics})


class SourceLosses:
    """Sums by source over the steps since the last record, on the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Tensor], *, is_taken: Tensor) -> dict[str, Tensor]:
        """Add the sums of a step; return all other metrics.

        Args:
            is_taken: bool on the device. A step that was skipped does not count: its loss may not be finite.
        """
        others = {}
        for name, value in metrics.items():
            if name.startswith((NATS, TOKENS)):
                self._sums[name] = self._sums.get(name, 0.0) + torch.where(is_taken, value, 0.0)
            else:
                others[name] = value
        return others

    def take(self) -> dict[str, dict[str, float]]:
        """Return {"source_losses": {source: mean cross entropy in nats a token}}, and begin anew.

        Sources without a token are left out; without any, so is the entry.
        """
        if not self._sums:
            return {}
        values = dict(zip(self._sums, torch.stack([*self._sums.values()]).tolist(), strict=True))
        self._sums = {}
        counts = {name.removeprefix(TOKENS): tokens for name, tokens in values.items() if name.startswith(TOKENS)}
        losses = {name: values[f"{NATS}{name}"] / tokens for name, tokens in counts.items() if tokens}
        return {"source_losses": losses} if losses else {}
