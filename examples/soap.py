"""SOAP (arXiv:2409.11321), an optimizer of whole matrices that is no part of titanlite.

    [optimizer]
    name = "examples/soap.py:SOAP"
    lr = 3e-3

SOAP is Adam in the eigenbasis of Shampoo: the gradient of a matrix is rotated into the eigenvectors of the averages of
G G^T and G^T G, Adam's second moment is kept there, and the update is rotated back.

Parameters and gradients are DTensors, of which a rank has some rows, or plain tensors where one process has all of
them. Elementwise operations work on both as they are. What needs a whole matrix takes two functions: `whole` gathers
one, and `part_like` returns this rank's part of a result that every rank has computed. State that is sharded like its
parameter is saved, and loads on any number of ranks.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


class SOAP(torch.optim.Optimizer):
    """Adam in the eigenbasis of Shampoo's preconditioner.

    Args:
        params: of float32. Matrices [F, D] and stacks of them [E, F, D] are rotated; vectors have Adam's update.
        betas: decay of the mean and of the square of gradients; the latter also of the averages of G G^T and G^T G.
        weight_decay: decoupled.
        frequency: steps between updates of the eigenvectors.
        largest_side: sides of a matrix that are longer are not rotated, such as the vocabulary.

    Raises:
        ValueError: a parameter is not of float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        frequency: int = 10,
        largest_side: int = 10_000,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "frequency": frequency, "largest_side": largest_side})
        if any(p.dtype != torch.float32 for group in self.param_groups for p in group["params"]):
            raise ValueError("SOAP is for parameters of float32")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        gradient = whole(parameter.grad)
        products: dict[str, Tensor] = {}
        if gradient.ndim > 1 and gradient.shape[-2] <= group["largest_side"]:
            products["left"] = gradient @ gradient.mT
        if gradient.ndim > 1 and gradient.shape[-1] <= group["largest_side"]:
            products["right"] = gradient.mT @ gradient
        if not state:  # no update yet: it would be in the basis of its own gradient
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            for side, product in products.items():
                state[f"average_{side}"] = part_like(parameter, product * (1 - beta2))
                state[f"basis_{side}"] = part_like(parameter, eigenvectors(product))
            return

        state["step"] += 1
        bases = {side: whole(state[f"basis_{side}"]) for side in products}
        state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(part_like(parameter, rotate(gradient, bases).square()), 1 - beta2)
        mean = rotate(whole(state["exp_avg"]), bases) / (1 - beta1 ** state["step"])
        square = whole(state["exp_avg_sq"]) / (1 - beta2 ** state["step"])
        update = rotate(mean / (square.sqrt() + group["eps"]), {side: basis.mT for side, basis in bases.items()})
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(part_like(parameter, update), alpha=group["lr"])

        for side, product in products.items():
            average = state[f"average_{side}"].lerp_(part_like(parameter, product), 1 - beta2)
            if state["step"] % group["frequency"] == 0:  # one step of power iteration
                basis = torch.linalg.qr(whole(average) @ bases[side]).Q
                state[f"basis_{side}"].copy_(part_like(parameter, basis))


def rotate(matrix: Tensor, bases: dict[str, Tensor]) -> Tensor:
    """Return left^T matrix right."""
    if "left" in bases:
        matrix = bases["left"].mT @ matrix
    return matrix @ bases["right"] if "right" in bases else matrix


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor from the ranks that have its parts. A tensor that is not sharded is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(parameter: Tensor, values: Tensor) -> Tensor:
    """Shard values, which every rank has, as a parameter of as many dimensions is sharded. Nothing is sent."""
    if not isinstance(parameter, DTensor):
        return values
    return distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)


def eigenvectors(product: Tensor) -> Tensor:
    """Return the eigenvectors of a symmetric matrix as columns, the largest eigenvalue first.

    In float32, the solver does not converge for some matrices of low rank.
    """
    return torch.linalg.eigh(product.double()).eigenvectors.flip(-1).to(product.dtype)
