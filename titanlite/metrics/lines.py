"""Console lines of a step and of a validation."""

from typing import Any


def step_line(record: dict[str, Any]) -> str:
    mfu = f"{record['mfu']:.1%}" if record["mfu"] is not None else "n/a"
    compiling = f"  compile {record['compile_seconds']:.1f} s" if "compile_seconds" in record else ""
    distilled = f"distill {record['distill_loss']:.4f}  " if "distill_loss" in record else ""
    return (
        f"step {record['step']:>5}  loss {record['loss']:.4f}  {distilled}"
        f"grad_norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}  {record['tokens_per_second']:,.0f} tokens/s  "
        f"{record['step_seconds']:.3f} s/step  data {record['data_wait_seconds'] / record['step_seconds']:.1%}  "
        f"memory {record['memory_gib']:.2f} GiB  {record['tflops_per_device']:.2f} TFLOP/s  MFU {mfu}{compiling}"
    )


def validation_line(record: dict[str, Any]) -> str:
    parts = []
    for name, source in record["sources"].items():
        bits = "" if source["bits_per_byte"] is None else f", {source['bits_per_byte']:.4f} bits per byte"
        parts.append(f"{name} {source['loss']:.4f}{bits} ({source['sequences']:,} sequences)")
    return f"step {record['step']:>5}  validation loss {record['loss']:.4f}: {'; '.join(parts)}"
