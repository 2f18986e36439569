"""Options of distillation: [teacher] and [distill]."""

from collections.abc import Iterator
from typing import Literal

from titanlite.config.types import Fraction, Name, Positive, PositiveInt, Section


class Teacher(Section):
    path: Name | None = None
    """Weights of the teacher: a checkpoint, the folder of a run (its newest complete checkpoint), a URL of either, or a
    Hugging Face folder. The teacher has the vocabulary of the model, is frozen, and is never in a checkpoint."""
    cache: Name | None = None
    """Folder with the teacher's most probable tokens for all of the training data, which training reads instead of
    running the teacher. `titanlite distill cache` writes it, from teacher.path. If that is set in training, too, the
    cache must be of that teacher."""
    config: Name | None = None
    """Config file with the model of the teacher, where the weights do not describe it. Default: what is beside the
    weights."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Dtype of the teacher's weights and compute. Default: training.mixed_precision_param."""
    fsdp_reshard_after_forward: Literal["always", "never"] | PositiveInt = "always"
    """Time at which the gathered parameters of the teacher are freed. always frees each FSDP unit after its forward.
    never keeps the whole teacher on every process from the first step on. A number k keeps a 1/k shard of each unit."""
    enable_cpu_offload: bool = False
    """Keep the shards of the teacher in host memory."""

    @property
    def is_set(self) -> bool:
        """Return whether training has a teacher, or a cache of one."""
        return self.path is not None or self.cache is not None

    @property
    def is_live(self) -> bool:
        """Return whether the teacher runs in training."""
        return self.path is not None and self.cache is None


class Distill(Section):
    ratio: Fraction = 0.0
    """Share of the teacher in what is minimized: (1 - ratio) * loss + ratio * temperature^2 * divergence. 0 is training
    without a teacher."""
    temperature: Positive = 1.0
    """Divisor of both models' logits before the softmax of the divergence (arXiv:1503.02531)."""
    kind: Literal["forward_kl", "reverse_kl", "js"] = "forward_kl"
    """Divergence of the student p from the teacher q: KL(q, p), KL(p, q), or the mean of both models' KL to their
    average (Jensen-Shannon)."""


def find_teacher_conflicts(teacher: Teacher, distill: Distill, loss: str | None) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, problem) where the sections do not fit together.

    Args:
        loss: `training.loss`. A loss of the user's own is given the teacher's output instead of `[distill]`.
    """
    if teacher.path is None and teacher.cache is not None and teacher != Teacher(cache=teacher.cache):
        yield "teacher.path", "is not set, and other options of [teacher] are of its weights: set it, or leave them out"
    if teacher.cache is not None and distill.kind == "reverse_kl":
        problem = "reverse_kl depends on what the teacher finds improbable, which a cache does not hold"
        yield "distill.kind", f"{problem}: set forward_kl, or leave teacher.cache out"
    if not teacher.is_set:
        if teacher != Teacher():
            yield "teacher.path", "is not set: name the weights of the teacher, or leave [teacher] out"
        if distill != Distill():
            yield "distill.ratio", "needs a teacher: set teacher.path, or leave [distill] out"
    elif loss and distill != Distill():
        yield "distill.ratio", "belongs to titanlite's own loss, and training.loss names another: leave [distill] out"
    elif not loss and not distill.ratio:
        yield "distill.ratio", "is 0, so the teacher has no effect: set it above 0, or leave [teacher] out"
