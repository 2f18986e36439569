"""Floating point operations of training a decoder."""

from typing import TYPE_CHECKING

from torch import Tensor

from titanlite.models.base import added_parameters, unique_parameters, vector_names
from titanlite.ops.attention import seen_causally

if TYPE_CHECKING:
    from titanlite.models.decoder import Decoder


def decoder_flops(model: "Decoder", seq_len: int, *, causal: bool) -> float:
    """Floating point operations of forward and backward for one token.

    Each weight of a matmul costs 2 operations forward and 4 backward. So do the dims of queries and values, for each
    visible position: seq_len or the window, and with a causal mask what it leaves on average. A frozen weight has no
    gradient, which saves 2. Backward ends at the first block with a trained parameter. Adapters are weights of matmuls,
    too.
    """
    args = model.args
    layers = [*range(args.n_layers), *([args.n_layers - 1] if model.further_weight else [])]
    blocks = [model.attention_weights(layer) + model.feed_forward_weights(layer) for layer in layers]
    weights = sum(blocks) + args.dim * args.vocab_size
    if model.further_weight:
        weights += args.dim * (args.vocab_size + 2 * args.dim)
    weights += sum(parameter.numel() for parameter in added_parameters(model).values())
    windows = [min(attention.window or seq_len, seq_len) for attention in model.attentions]
    seen = [seen_causally(n, seq_len) if causal else n for n in windows]
    scores = [model.attention_dims(layer) * seen[layer] for layer in layers]
    vectors, parameters = vector_names(model), unique_parameters(model)
    matrices = ((name, p) for name, p in parameters if name not in vectors and not p.requires_grad)
    frozen = sum(_weights_per_token(model, name, parameter) for name, parameter in matrices)
    first = _blocks_without_backward(model)
    skipped = 2 * sum(blocks[:first]) + 4 * sum(scores[:first])
    return 6 * weights + 6 * sum(scores) - 2 * frozen - skipped


def _weights_per_token(model: "Decoder", name: str, parameter: Tensor) -> float:
    """Weights of a matrix that a token is multiplied with. A lookup in a table multiplies none."""
    if name.startswith("tok_embeddings.") and not model.args.tied_head:
        return 0
    return parameter.numel() * (model.share_of_experts() if parameter.ndim == 3 else 1)


def _blocks_without_backward(model: "Decoder") -> int:
    """Number of first blocks that backward does not reach, because nothing up to their end is trained."""
    if any(parameter.requires_grad for parameter in model.tok_embeddings.parameters()):
        return 0
    trains = [any(parameter.requires_grad for parameter in block.parameters()) for block in model.layers]
    return trains.index(True) if any(trains) else len(trains)
