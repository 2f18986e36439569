"""Parameters that a technique adds to a model: their initial values, and how they are found."""

from typing import ClassVar

from torch import nn

from titanlite.models.initial import InitialValues


class AddsParameters(nn.Module):
    """Layer that a technique has put in place of a model's own, with parameters that the model's author does not know.

    It defines their initial values. Weights that a run begins with need not have them.
    """

    added: ClassVar[tuple[str, ...]]
    """Names of these parameters in the layer."""

    def added_values(self, name: str) -> InitialValues:
        """Return the initial values of one of these parameters."""
        raise NotImplementedError


def added_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that techniques have added, by name."""
    return {
        f"{prefix}.{name}": module.get_parameter(name)
        for prefix, module in model.named_modules()
        if isinstance(module, AddsParameters)
        for name in module.added
    }
