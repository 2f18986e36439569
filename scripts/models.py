"""Make the table of docs/models.md from the code: families, sizes, axes, and formats of weights.

python scripts/models.py
"""

import csv
from collections.abc import Iterator
from pathlib import Path

from titanlite.config.load import load
from titanlite.config.shipped import find_config, shipped_names
from titanlite.models.base import unique_parameters
from titanlite.models.registry import MODELS, resolve_model

PAGE = Path("docs/models.md")
BEGIN, END = "<!-- python scripts/models.py writes from here -->", "<!-- to here -->"
TITLES = {
    "deepseek_v3": "DeepSeek-V3",
    "gemma3": "Gemma 3",
    "glm4_moe": "GLM-4.5",
    "gpt_oss": "gpt-oss",
    "llama3": "Llama 3",
    "olmo3": "OLMo 3",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "smollm3": "SmolLM3",
}
"""Names of families in docs/combinations.csv."""
FORMATS = {"hugging_face": "Hugging Face", "torchtitan": "torchtitan"}
AXES = {"context": "c", "expert": "e", "tensor": "t", "pipeline": "p"}


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    configs: dict[str, list[str]] = {}
    for name in shipped_names():
        configs.setdefault(load(find_config(name), []).model.name or "llama3", []).append(f"`{name}`")
    with open("docs/combinations.csv") as file:
        trained = [(row["row"], row["layout"]) for row in csv.DictReader(file) if not row["refused"]]
    yield "| family | `model.name` | `model.flavor` (billion parameters) | axes beside FSDP | weights | configs |"
    yield "|---|---|---|---|---|---|"
    for name, title in TITLES.items():
        model = MODELS[name]
        sizes = []
        for flavor in model.flavors:
            built = resolve_model(name, flavor, {}).build()
            billions = sum(parameter.numel() for _, parameter in unique_parameters(built)) / 1e9
            sizes += [f"`{flavor}` ({billions:,.{2 if billions < 10 else 0}f})"] if flavor != "debug" else []
        axes = [axis for axis, letter in AXES.items() if any(row == title and letter in at for row, at in trained)]
        formats = [format for key, format in FORMATS.items() if getattr(model.formats, key)]
        shipped = ", ".join(configs.get(name, ()))
        yield f"| {title} | `{name}` | {', '.join(sizes)} | {', '.join(axes)} | {', '.join(formats)} | {shipped} |"


def with_table(page: str) -> str:
    """Return the page with its table made again: what stands between its two marks."""
    before, _, rest = page.partition(BEGIN)
    lines = "\n".join(table())
    return f"{before}{BEGIN}\n\n{lines}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
