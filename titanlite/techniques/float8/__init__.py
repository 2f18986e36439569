"""Float8 training of linear layers; `layers.py` swaps them."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from titanlite.schema import Config
from titanlite.techniques.technique import Claim, Conflict, Options, Parts, Technique, reads

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.models.base import Model
    from titanlite.models.registry import ModelSpec
    from titanlite.runtime.hardware import Hardware


GATHERS = "quantize.linear.float8.enable_fsdp_float8_all_gather"


class Float8Training(Technique):
    option = "quantize.linear.float8.enable"

    def is_used(self, config: Config) -> bool:
        return config.quantize.linear.float8.enable

    def claims(self, config: Config) -> dict[Claim, str]:
        gathers = {Claim.PARAMETERS: GATHERS} if config.quantize.linear.float8.gathers_float8 else {}
        # Tensor parallelism splits the float8 layers itself.
        layers = {} if config.parallelism.tensor_parallel_degree > 1 else {Claim.LAYERS: self.option}
        return {**layers, Claim.MATMULS: self.option, **gathers}

    @reads("quantize", "compile", "parallelism.fsdp_reshard_after_forward", "training.mixed_precision_param")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        float8 = config.quantize.linear.float8
        if not float8.enable:
            return
        if find_spec("torchao") is None:
            from titanlite.runtime.console import install_hint

            yield self.option, f"needs torchao: {install_hint('float8')}"
        keep = config.parallelism.fsdp_reshard_after_forward
        if float8.gathers_float8 and isinstance(keep, int) and keep > 1:
            problem = f"FSDP2 cannot combine {keep} with {GATHERS}: set that to false"
            yield "parallelism.fsdp_reshard_after_forward", problem
        if float8.recipe_name == "mxfp8" and not float8.emulate and config.training.mixed_precision_param != "bfloat16":
            yield "quantize.linear.float8.recipe_name", "mxfp8 needs training.mixed_precision_param = bfloat16"
        if not config.compile.enable and not float8.emulate:
            yield self.option, "is slower than bfloat16 without compile.enable = true"

    @reads("quantize")
    def check_machine(self, config: Config, device: "torch.device") -> None:
        from titanlite.techniques.float8.layers import check_float8

        check_float8(config.quantize.linear.float8)

    def summary(self, config: Config) -> str:
        return f"float8 {config.quantize.linear.float8.recipe_name}"

    def parts(self, config: Config, mesh: "DeviceMesh", run: Path) -> Parts:
        from titanlite.techniques.float8.layers import weight_scaler

        return Parts(after_update=partial(weight_scaler, float8=config.quantize.linear.float8))

    def variants(self, config: Config, spec: "ModelSpec", hardware: "Hardware") -> list[tuple[str, Options]]:
        from titanlite.techniques.float8.layers import choose_layers

        is_possible = (
            config.compile.enable
            and hardware.fp8_flops is not None
            and bool(choose_layers(spec.build(), config.quantize.linear.float8)[0])
        )
        return [("", {self.option: False}), *([("float8", {self.option: True})] if is_possible else [])]

    facts: ClassVar[dict[str, Any]] = {"float8": None, "float8_all_gather": False}
    """Recipe of the parameter's layer, and whether it is gathered in float8."""

    def parameter_facts(self, model: "Model", config: Config) -> "dict[nn.Parameter, dict[str, Any]]":
        from titanlite.techniques.float8.layers import float8_parameters

        recipe = config.quantize.linear.float8.recipe_name
        return {
            parameter: {"float8": recipe, "float8_all_gather": is_gathered}
            for parameter, is_gathered in float8_parameters(model).items()
        }


TECHNIQUE = Float8Training()
