"""All techniques in the order in which they are applied, and which of them a config asks for. Never imports torch.

A technique is a file or a folder here, with a `TECHNIQUE` that keeps the contract of `technique.py`. It is imported
when a config sets one of its options, so that a plain run reads as short as it is.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from titanlite.schema import Config
from titanlite.techniques.technique import Conflict, Parts, Technique, nothing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.models.base import Model
    from titanlite.techniques.offload.updates import HostUpdates

Found = TypeVar("Found")

TECHNIQUES: dict[str, tuple[str, ...]] = {
    "lora": ("lora",),
    "freeze": ("freeze",),
    "multi_token": ("training.multi_token_weight",),
    "dropout": ("training.dropout",),
    "balance_loss": ("model.args", "model.file"),
    "parametrization": ("optimizer.parametrization", "optimizer.base_width", "optimizer.base_depth"),
    "document_mask": ("data.document_mask",),
    "context": ("parallelism.context_parallel_degree", "debug.reproducible_context_degree"),
    "float8": ("quantize.linear.float8",),
    "tensor": ("parallelism.tensor_parallel_degree",),
    "expert": ("parallelism.expert_parallel_degree",),
    "pipeline": ("parallelism.pipeline_parallel_degree",),
    "offload": ("offload", "training.enable_cpu_offload"),
    "in_backward": ("optimizer.in_backward",),
    "average": ("average",),
    "loss_scale": ("training.mixed_precision_param=float16",),
    "distill": ("teacher", "distill"),
    "profiling": ("profiling",),
    "layer_health": ("metrics.layers",),
    "reproducible": ("debug.reproducible_layouts", "debug.hash_freq"),
}
"""Options and sections of each technique, by the name of its module; the value that asks for it if only one does."""


def asked_for(config: Config) -> list[Technique]:
    """Return the techniques with an option that is not at its default, used or not."""
    default = Config()

    def is_set(option: str) -> bool:
        key, _, value = option.partition("=")
        found = _value(config, key)
        return str(found) == value if value else found != _value(default, key)

    return _load(name for name, options in TECHNIQUES.items() if any(map(is_set, options)))


def used(config: Config) -> list[Technique]:
    """Return the techniques that a config uses."""
    return [technique for technique in asked_for(config) if technique.is_used(config)]


def exclusions(config: Config) -> Iterator[Conflict]:
    """Yield the pairs of used techniques that claim the same, as a problem of the second one."""
    for first, second in combinations([technique.claims(config) for technique in used(config)], 2):
        if claim := next((common for common in first if common in second), None):
            value, other = (json.dumps(_value(config, claims[claim])) for claims in (second, first))
            yield (
                second[claim],
                f"{value} cannot be combined with {first[claim]} = {other}, which {claim} too: choose one of the two",
            )


def every_technique() -> list[Technique]:
    """Return all techniques, for tools that report what a config could ask for."""
    return _load(TECHNIQUES)


def choose_trained(model: "Model", config: Config) -> None:
    """Freeze parameters and add adapters as the config asks for, in place.

    Args:
        model: may be on the meta device.

    Raises:
        ConfigError: the model does not fit.
    """
    for technique in used(config):
        technique.choose_trained(model, config)


def places(config: Config) -> dict[str, str]:
    """Return host or disk for each category of memory that is not on the device."""
    return {category: place for technique in used(config) for category, place in technique.places(config).items()}


def parts_of(config: Config, mesh: "DeviceMesh", run: Path = Path()) -> Parts:
    """Return the parts of a run that the techniques of a config provide, in their order.

    Args:
        run: folder of the run.
    """
    techniques = used(config)
    each = [technique.parts(config, mesh, run) for technique in techniques]

    def only(part_of: "Callable[[Parts], Found | None]") -> "Found | None":
        """Return a part of which a run has one. `exclusions` refuses a config whose techniques claim the same."""
        pairs = zip(techniques, map(part_of, each), strict=True)
        found = [(technique.option, part) for technique, part in pairs if part is not None]
        options = " and ".join(option for option, _ in found)
        assert len(found) < 2, f"{options} provide the same part of a run, which has one: add a Claim"
        return found[0][1] if found else None

    def after_update(model: "Model") -> Callable[[], None]:
        hooks = [hook for part in each if (hook := part.after_update(model)) is not nothing]

        def call() -> None:
            for hook in hooks:
                hook()

        return call if hooks else nothing

    def updates(*arguments: Any) -> "HostUpdates | None":
        return only(lambda part: part.updates(*arguments))

    return Parts(
        step_cls=only(lambda part: part.step_cls),
        memory=only(lambda part: part.memory),
        updates=updates,
        average=only(lambda part: part.average),
        batch=lambda batch: reduce(lambda batch, part: part.batch(batch), each, batch),
        loss=lambda loss: reduce(lambda loss, part: part.loss(loss), each, loss),
        vocabulary=only(lambda part: part.vocabulary),
        after_update=after_update,
        observers=lambda observed: [observer for part in each for observer in part.observers(observed)],
    )


def _load(names: Iterable[str]) -> list[Technique]:
    return [import_module(f"titanlite.techniques.{name}").TECHNIQUE for name in names]


def _value(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)
