"""What is measured of each layer. A report reads it, and imports no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanlite.capture import Kind

NAMES: "dict[Kind, str]" = {
    "after parameter": "parameters",
    "gradient parameter": "gradients",
    "update parameter": "updates",
    "forward output": "activations",
}
"""{kind of the captured value: its name in records}."""
