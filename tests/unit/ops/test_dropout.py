"""Dropout by a hash: the share that is dropped, its scale, and that each place and each token draws its own."""

import pytest
import torch

from titanlite.ops.dropout import LEVELS, Dropout, draws_of_blocks

DROPOUT = Dropout.of(0.25, seed=0)
DRAWS = torch.arange(2**40, 2**40 + 300).view(3, 100)


def dropped(dropout: Dropout, draws: torch.Tensor, place: int = 0, dim: int = 100) -> torch.Tensor:
    return dropout(torch.ones(*draws.shape, dim), draws, place) == 0


def test_the_share_and_the_scale() -> None:
    x = torch.randn(3, 100, 100, requires_grad=True)
    out = DROPOUT(x, DRAWS)
    is_dropped = out == 0
    assert is_dropped.float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert torch.equal(out[~is_dropped], (x * (1 / 0.75))[~is_dropped])
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(is_dropped, 0, 1 / 0.75))
    assert Dropout.of(0.1, seed=0).dropped / LEVELS == 26 / 256


def test_each_token_and_place_draws_its_own() -> None:
    """Draws that are independent agree in 0.25^2 + 0.75^2 of the values."""
    of_blocks = draws_of_blocks(DRAWS, 2)
    assert len({number for draws in of_blocks for number in draws.flatten().tolist()}) == 3 * 300
    masks = [
        dropped(DROPOUT, DRAWS),
        dropped(DROPOUT, DRAWS, 1),
        dropped(DROPOUT, DRAWS + 300),
        dropped(Dropout.of(0.25, seed=1), DRAWS),
        *(dropped(DROPOUT, draws) for draws in of_blocks),
    ]
    pairs = [(a, b) for i, a in enumerate(masks) for b in masks[:i]]
    neighbours = [(masks[0][:, 1:], masks[0][:, :-1]), (masks[0][..., 1:], masks[0][..., :-1])]
    for one, other in pairs + neighbours:
        assert (one == other).float().mean().item() == pytest.approx(0.625, abs=0.015)


def test_a_part_of_the_tokens_draws_what_all_do() -> None:
    whole = dropped(DROPOUT, DRAWS)
    assert torch.equal(dropped(DROPOUT, DRAWS[1:, 40:60]), whole[1:, 40:60])
    assert torch.equal(dropped(DROPOUT, DRAWS), whole)
