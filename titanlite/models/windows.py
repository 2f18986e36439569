"""Decoders of which most layers see a window of tokens only."""

from dataclasses import dataclass

from titanlite.models.decoder import DecoderArgs, LayerAttention


@dataclass(frozen=True, kw_only=True)
class WindowedArgs(DecoderArgs):
    """Layers with a window have the first of `ropes`, the others the last."""

    rope_scaling_factor: float
    window: int
    """Tokens that a token sees in a layer with a window, itself included."""
    full_every: int
    """Of each so many layers, the last has no window."""

    def attention_of(self, layer: int) -> LayerAttention:
        is_full = (layer + 1) % self.full_every == 0
        return LayerAttention(rope=len(self.ropes) - 1) if is_full else LayerAttention(window=self.window)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "full_every", "rope_scaling_factor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
