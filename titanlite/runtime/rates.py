"""Rates that a device was measured to reach, by the size of a kernel (`titanlite calibrate` writes them)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from titanlite.runtime.nearest import did_you_mean

Curve = tuple[tuple[float, float], ...]
"""(size of a kernel, rate), sorted by size. Sizes are FLOPs or bytes; rates are the same a second."""
DTYPES = ("bfloat16", "float32", "float8")
NUMBERS = ("launch_seconds", "hop_seconds", "to_device", "to_host")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
BANDWIDTHS = ("links", "network")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured rates. What is not measured is empty or None, and has the assumptions of `plan`."""

    matmul: Mapping[str, Curve] = field(default_factory=dict)
    """Curves of matmuls, by dtype."""
    attention: Mapping[str, Curve] = field(default_factory=dict)
    """Curves of causal attention, by dtype: forward and backward together. Masked scores are not counted."""
    memory: Curve = ()
    """Bytes read and written by a kernel that computes little."""
    launch_seconds: float | None = None
    """Host time of a small operation."""
    hop_seconds: float | None = None
    """Latency from one process to the next within a node."""
    links: Mapping[str, float] = field(default_factory=dict)
    """Bytes a second that pass each member of a node's ring in long collectives, by collective."""
    network: Mapping[str, float] = field(default_factory=dict)
    """The same between nodes, for each member in a node."""
    to_device: float | None = None
    """Bytes a second of copies from pinned host memory to the GPU."""
    to_host: float | None = None
    """Bytes a second of copies back."""

    def of(self, kind: str, dtype: str) -> Curve:
        """Return the curve of a kind of kernel; empty if it was not measured."""
        return {"matmul": self.matmul, "attention": self.attention}.get(kind, {}).get(dtype, ())

    def shared_by(self, processes: float) -> "Rates":
        """Return the rates of each of several processes that share the device."""

        def share(curve: Curve) -> Curve:
            return tuple((size, rate / processes) for size, rate in curve)

        return Rates(
            matmul={dtype: share(curve) for dtype, curve in self.matmul.items()},
            attention={dtype: share(curve) for dtype, curve in self.attention.items()},
            memory=share(self.memory),
            launch_seconds=self.launch_seconds,
            hop_seconds=self.hop_seconds,
            links={op: rate / processes for op, rate in self.links.items()},
            network=self.network,
            to_device=self.to_device,
            to_host=self.to_host,
        )


def rate_at(curve: Curve, size: float) -> float:
    """Return the rate of a kernel: between two measured sizes linear in the logarithms, outside of them constant."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (small, slow), (large, fast) in pairwise(curve):
        if size <= large:
            share = math.log(size / small) / math.log(large / small)
            return slow * (fast / slow) ** share
    return curve[-1][1]


def read_rates(value: Any) -> Rates | str:
    """Return the rates that a table of a TOML file describes, or the first mistake in it."""
    if not isinstance(value, dict):
        return f"expected a table as `titanlite calibrate` writes it, got {value!r}"
    found: dict[str, Any] = {}
    for key, entry in value.items():
        if key in NUMBERS:
            if not _is_positive(entry):
                return f"{key}: expected a number above 0, got {entry!r}"
            found[key] = float(entry)
            continue
        if key in BANDWIDTHS:
            if not isinstance(entry, dict) or not all(it in COLLECTIVES and _is_positive(entry[it]) for it in entry):
                return f"{key}: expected bytes a second for some of {', '.join(COLLECTIVES)}"
            found[key] = {op: float(rate) for op, rate in entry.items()}
            continue
        if key == "memory":
            found[key] = _curve(entry)
        elif key in ("matmul", "attention"):
            if not isinstance(entry, dict) or any(dtype not in DTYPES for dtype in entry):
                return f"{key}: expected a table with some of {', '.join(DTYPES)}"
            found[key] = {dtype: _curve(points) for dtype, points in entry.items()}
        else:
            return f"{key}: unknown key{did_you_mean(key, ('matmul', 'attention', 'memory', *BANDWIDTHS, *NUMBERS))}"
        curves = found[key].values() if isinstance(found[key], dict) else [found[key]]
        if None in curves:
            return f"{key}: expected pairs of numbers above 0, [[size, rate], ...], in the order of their sizes"
    return Rates(**found)


def _curve(points: Any) -> Curve | None:
    if not isinstance(points, list) or not points:
        return None
    if not all(isinstance(it, list) and len(it) == 2 and all(map(_is_positive, it)) for it in points):
        return None
    curve = tuple((float(size), float(rate)) for size, rate in points)
    return curve if all(a < b for (a, _), (b, _) in pairwise(curve)) else None


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def rates_text(rates: Rates) -> str:
    """Return the rates as the table `[rates]` of a TOML file."""

    def line(name: str, points: Sequence[tuple[float, float]]) -> str:
        return f"{name} = [{', '.join(f'[{size:.4g}, {rate:.4g}]' for size, rate in points)}]"

    lines = ["[rates]  # of a kernel: [FLOPs or bytes, the same a second]"]
    lines += [f"{name} = {getattr(rates, name):.3g}" for name in NUMBERS if getattr(rates, name) is not None]
    lines += [line("memory", rates.memory)] if rates.memory else []
    for name, curves in (("matmul", rates.matmul), ("attention", rates.attention)):
        if curves:
            lines += ["", f"[rates.{name}]", *(line(dtype, curve) for dtype, curve in curves.items())]
    for name in BANDWIDTHS:
        if found := getattr(rates, name):
            lines += ["", f"[rates.{name}]  # bytes a second", *(f"{op} = {rate:.3g}" for op, rate in found.items())]
    return "\n".join(lines) + "\n"
