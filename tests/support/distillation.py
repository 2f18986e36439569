"""Students and teachers of a few tokens, and the plain formulas of distillation in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from titanlite.batch import IGNORE
from titanlite.loss import LossTerm
from titanlite.ops.kernels import Kernels
from titanlite.schema import Distill
from titanlite.techniques.distill.divergence import head_divergence

VOCABULARY, TOKENS, DIM, TEACHER_DIM = 301, 66, 48, 80
KINDS = ["forward_kl", "reverse_kl", "js"]


@dataclass(frozen=True)
class Given:
    """`TeacherOutput` of tensors."""

    hidden_BLD: Tensor
    weight_VD: Tensor

    @contextmanager
    def divergence(self, distill: Distill, kernels: Kernels) -> Iterator[LossTerm]:
        yield head_divergence(self.hidden_BLD.flatten(0, 1), self.weight_VD, distill, kernels)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Given]:
    """Hidden states and weight of a student, labels, some of which do not count, and a wider teacher."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    hidden, weight = draw(2, TOKENS // 2, DIM).requires_grad_(), (draw(VOCABULARY, DIM) / 4).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (2, TOKENS // 2), generator=generator)
    labels[0, :9] = IGNORE
    return hidden, weight, labels, Given(draw(2, TOKENS // 2, TEACHER_DIM), draw(VOCABULARY, TEACHER_DIM) / 3)


def kl(a: Tensor, b: Tensor) -> Tensor:
    """KL(a, b) of each token, from the logarithms of both."""
    return F.kl_div(b, a, reduction="none", log_target=True).sum(-1)


def divergence(log_p: Tensor, log_q: Tensor, kind: str) -> Tensor:
    """The divergence of each token, by its formula; p is the student's, q the teacher's."""
    log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0, dtype=torch.float64))
    return {
        "forward_kl": lambda: kl(log_q, log_p),
        "reverse_kl": lambda: kl(log_p, log_q),
        "js": lambda: (kl(log_p, log_m) + kl(log_q, log_m)) / 2,
    }[kind]()


def plain(
    hidden: Tensor, weight: Tensor, labels: Tensor, teacher: Given, distill: Distill, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Minimized sum and T^2 * divergence, by the formulas on whole logits in float64.

    The divergence is over the tokens that both have.
    """
    logits = (hidden.double() @ weight.double().t()).flatten(0, 1)
    theirs = (teacher.hidden_BLD.double() @ teacher.weight_VD.double().t()).flatten(0, 1)
    valid = labels.flatten() != IGNORE
    own = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
    own = own + z_loss * (logits.logsumexp(1).square() * valid).sum()
    common = min(len(weight), len(teacher.weight_VD))
    log_p, log_q = ((x[:, :common] / distill.temperature).log_softmax(1) for x in (logits, theirs))
    values = divergence(log_p, log_q, distill.kind)
    distilled = distill.temperature**2 * (values * valid).sum()
    return (1 - distill.ratio) * own + distill.ratio * distilled, distilled
