"""Distillation from a teacher that runs in training."""

from collections.abc import Iterator, Mapping

from titanlite.schema import Config, Distill, Teacher
from titanlite.techniques.technique import Conflict, HostTraffic, Technique, reads


class Distillation(Technique):
    option = "teacher.path"

    def is_used(self, config: Config) -> bool:
        return config.teacher.path is not None

    @reads("teacher", "distill", "training.loss")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        teacher, distill, loss = config.teacher, config.distill, config.training.loss
        if teacher.path is None:
            if teacher != Teacher():
                yield "teacher.path", "is not set: name the weights of the teacher, or leave [teacher] out"
            if distill != Distill():
                yield "distill.ratio", "needs a teacher: set teacher.path, or leave [distill] out"
        elif loss and distill != Distill():
            yield (
                "distill.ratio",
                "belongs to titanlite's own loss, and training.loss names another: leave [distill] out",
            )
        elif not loss and not distill.ratio:
            yield "distill.ratio", "is 0, so the teacher has no effect: set it above 0, or leave [teacher] out"

    def places(self, config: Config) -> dict[str, str]:
        return {"teacher": "host"} if config.teacher.enable_cpu_offload else {}

    def host_traffic(self, config: Config, sizes: Mapping[str, float], accumulation: int) -> HostTraffic:
        return HostTraffic(accumulation * sizes["teacher"] if self.places(config) else 0.0)

    def summary(self, config: Config) -> str:
        return f"a teacher ({config.teacher.path})"


TECHNIQUE = Distillation()
