"""titanlite: a composable PyTorch pretraining framework.

Nothing heavy is imported here: each name of the Python interface is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from titanlite.version import __version__

if TYPE_CHECKING:
    from titanlite.models.base import Model, ModelArgs
    from titanlite.runtime.errors import ConfigError, RunStopped, UserError
    from titanlite.schema import Config, dump
    from titanlite.tools.api import build_model, build_run, generate, load_config, load_model, run_training
    from titanlite.tools.report.run_records import RunRecords, read_run

PUBLIC = {
    "load_config": "titanlite.tools.api",
    "run_training": "titanlite.tools.api",
    "build_run": "titanlite.tools.api",
    "build_model": "titanlite.tools.api",
    "load_model": "titanlite.tools.api",
    "generate": "titanlite.tools.api",
    "read_run": "titanlite.tools.report.run_records",
    "RunRecords": "titanlite.tools.report.run_records",
    "Config": "titanlite.schema",
    "dump": "titanlite.schema",
    "Model": "titanlite.models.base",
    "ModelArgs": "titanlite.models.base",
    "UserError": "titanlite.runtime.errors",
    "ConfigError": "titanlite.runtime.errors",
    "RunStopped": "titanlite.runtime.errors",
}
"""The Python interface: {name: its module}."""

__all__ = [
    "Config",
    "ConfigError",
    "Model",
    "ModelArgs",
    "RunRecords",
    "RunStopped",
    "UserError",
    "__version__",
    "build_model",
    "build_run",
    "dump",
    "generate",
    "load_config",
    "load_model",
    "read_run",
    "run_training",
]


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return getattr(import_module(PUBLIC[name]), name)
    raise AttributeError(f"module 'titanlite' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
