"""Make the diagrams of docs/fsdp.md (strategies, one step) and docs/parallelism.md (mesh, context parallelism).

    python scripts/diagrams.py

They are plain SVG on a white ground, so that they are readable on light and on dark pages.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parents[1] / "docs" / "images"
INK, FAINT, PAPER = "#1f2328", "#8c959f", "#ffffff"
BLUE, ORANGE, GREEN, PURPLE = "#54a3ff", "#f0883e", "#56b870", "#b083f0"
LIGHT_BLUE = "#cfe4ff"
FOUR = (BLUE, ORANGE, GREEN, PURPLE)


class Canvas:
    """SVG of a fixed size, drawn from the top left. Lengths are in pixels."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(width)}" height="{_n(height)}" '
            f'viewBox="0 0 {_n(width)} {_n(height)}" font-family="DejaVu Sans, Verdana, Helvetica, Arial, sans-serif">',
            f"<title>{escape(title)}</title>",
        ]
        self.box(0, 0, width, height, PAPER, line="none")

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, line: str = INK) -> None:
        """Draw a rectangle."""
        place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        self.parts.append(f'<rect {place} fill="{fill}" stroke="{line}" stroke-width="0.8"/>')

    def text(
        self, x: float, y: float, words: str, *, size: float = 12, anchor: str = "start", bold: bool = False
    ) -> None:
        """Write a line of text, whose middle is at the height y."""
        weight = ' font-weight="bold"' if bold else ""
        place = f'x="{_n(x)}" y="{_n(y + 0.36 * size)}"'
        self.parts.append(
            f'<text {place} font-size="{_n(size)}" text-anchor="{anchor}" fill="{INK}"{weight}>{escape(words)}</text>'
        )

    def line(self, x: float, y: float, x2: float, y2: float, *, color: str = FAINT, dashes: bool = False) -> None:
        """Draw a straight line."""
        dashed = ' stroke-dasharray="4 3"' if dashes else ""
        ends = f'x1="{_n(x)}" y1="{_n(y)}" x2="{_n(x2)}" y2="{_n(y2)}"'
        self.parts.append(f'<line {ends} stroke="{color}" stroke-width="1"{dashed}/>')

    def cell(self, x: float, y: float, width: float, height: float, fill: str, words: str, *, size: float = 11) -> None:
        """Draw a rectangle with text in its middle."""
        self.box(x, y, width, height, fill)
        self.text(x + width / 2, y + height / 2, words, size=size, anchor="middle")

    def svg(self) -> str:
        """Return the file's text."""
        return "\n".join([*self.parts, "</svg>", ""])


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


# Strategies


def strategies() -> str:
    """Return the picture of what each of four ranks holds with DDP, ZeRO-2, FSDP and HSDP."""
    canvas = Canvas(720, 376, "Parts of parameters, gradients and optimizer states that each of four ranks holds")
    whole, own, pair = [range(4)] * 4, [[r] for r in range(4)], [[2 * (r % 2), 2 * (r % 2) + 1] for r in range(4)]
    panels: list[tuple[str, list[Sequence[int]], list[Sequence[int]]]] = [
        ("DDP: mesh (4, 1)", [*whole], [*whole]),
        ('ZeRO-2: mesh (1, 4), reshard "never"', [*own], [*own]),
        ("FSDP, ZeRO-3: mesh (1, 4)", [*own], [*own]),
        ("HSDP: mesh (2, 2)", [*pair], [*pair]),
    ]
    for number, (title, parameters, states) in enumerate(panels):
        x, y = 12 + 356 * (number % 2), 12 + 166 * (number // 2)
        _strategy(canvas, x, y, title, parameters, states, whole_while_computing=title.startswith("ZeRO-2"))
    x = 12
    for fill, words in ((BLUE, "held always"), (LIGHT_BLUE, "held from forward to backward"), (PAPER, "not held")):
        canvas.box(x, 350, 13, 13, fill)
        canvas.text(x + 20, 356.5, words)
        x += 40 + 7.4 * len(words)
    return canvas.svg()


def _strategy(
    canvas: Canvas,
    x: float,
    y: float,
    title: str,
    parameters: list[Sequence[int]],
    states: list[Sequence[int]],
    *,
    whole_while_computing: bool,
) -> None:
    canvas.text(x, y + 10, title, size=13, bold=True)
    for rank in range(4):
        canvas.text(x + 106 + 62 * rank + 26, y + 36, f"rank {rank}", anchor="middle")
    rows = (("parameters", parameters, BLUE), ("gradients", states, ORANGE), ("states", states, GREEN))
    for row, (name, held, color) in enumerate(rows):
        top = y + 52 + 28 * row
        canvas.text(x, top + 9, name)
        for rank in range(4):
            for part in range(4):
                gathered = whole_while_computing and name == "parameters"
                fill = color if part in held[rank] else LIGHT_BLUE if gathered else PAPER
                canvas.box(x + 106 + 62 * rank + 13 * part, top, 13, 18, fill)


# One step


def step() -> str:
    """Return the picture of one step of FSDP: streams of collectives and of compute."""
    canvas = Canvas(760, 236, "One step of FSDP over time: all-gathers, compute and reduce-scatters of each unit")
    left, scale, tops = 112, 31.5, {"all-gather": 52, "compute": 96, "reduce-scatter": 140}
    colors = {"emb": PURPLE, "1": BLUE, "2": GREEN, "head": ORANGE}
    bars = [
        ("all-gather", "emb", 0, 1), ("all-gather", "1", 1, 1.2), ("all-gather", "2", 2.2, 1.2),
        ("all-gather", "head", 4.2, 1.2), ("all-gather", "2", 8, 1.2), ("all-gather", "1", 9.6, 1.2),
        ("compute", "emb", 1, 1), ("compute", "1", 2.2, 2), ("compute", "2", 4.2, 2), ("compute", "head", 6.2, 1.8),
        ("compute", "head", 8, 1.6), ("compute", "2", 9.6, 3), ("compute", "1", 12.6, 3), ("compute", "emb", 15.6, 1),
        ("reduce-scatter", "head", 9.6, 1.4), ("reduce-scatter", "2", 12.6, 1.4), ("reduce-scatter", "1", 15.6, 1.4),
        ("reduce-scatter", "emb", 17, 1),
    ]  # fmt: skip
    for name, top in tops.items():
        canvas.text(12, top + 15, name)
        canvas.line(left, top + 15, left + 20.2 * scale, top + 15)
    for stream, unit, begin, length in bars:
        canvas.cell(left + begin * scale, tops[stream], length * scale, 30, colors[unit], unit)
    canvas.cell(left + 18.4 * scale, tops["compute"], 1.8 * scale, 30, "#d8dee4", "update")
    for begin, end, words in ((0, 8, "forward"), (8, 18, "backward")):
        canvas.text(left + (begin + end) / 2 * scale, 24, words, size=13, anchor="middle", bold=True)
    for at in (8, 18.2):
        canvas.line(left + at * scale, 14, left + at * scale, 178, dashes=True)
    canvas.text(left, 200, "emb, 1, 2, head: FSDP units. Each is gathered while the one before it computes.")
    canvas.text(left, 220, "The head is kept for backward, and the embedding's backward needs no parameters.")
    return canvas.svg()


# The mesh


def mesh() -> str:
    """Return the picture of eight ranks with a further axis: context, tensor or experts."""
    canvas = Canvas(760, 474, "Eight ranks of a mesh with context parallelism, tensor parallelism or experts")
    quarters = [f"{rank % 4 + 1} of 4" for rank in range(8)]
    pairs = [f"batch {rank // 2}" for rank in range(8)]
    panels: list[tuple[str, list[tuple[str, list[str]]]]] = [
        ("replicate 2 x shard 2 x context 2", [
            ("sequences", pairs),
            ("tokens of each", [f"part {rank % 2}" for rank in range(8)]),
            ("parameters", quarters),
        ]),
        ("replicate 2 x shard 2 x tensor 2", [
            ("sequences", pairs),
            ("heads", [f"half {rank % 2}" for rank in range(8)]),
            ("parameters", quarters),
        ]),
        ("replicate 2 x shard 4, and experts over 2", [
            ("sequences", [f"batch {rank}" for rank in range(8)]),
            ("experts", [f"half {rank % 2}" for rank in range(8)]),
            ("part of these", [f"{rank // 2 % 2 + 1} of 2" for rank in range(8)]),
            ("other parameters", quarters),
        ]),
    ]  # fmt: skip
    left, width, y = 140, 75, 58
    for rank in range(8):
        canvas.text(left + width * (rank + 0.5), 42, f"rank {rank}", anchor="middle", bold=True)
    for replica in range(2):
        canvas.text(left + width * (2 + 4 * replica), 18, f"replica {replica}", size=13, anchor="middle", bold=True)
        canvas.line(left + 4 * width * replica + 4, 30, left + 4 * width * (replica + 1) - 4, 30, color=INK)
    for title, rows in panels:
        canvas.text(12, y + 12, title, size=13, bold=True)
        y += 28
        for name, cells in rows:
            canvas.text(12, y + 11, name)
            _row(canvas, left, y, width, cells)
            y += 26
        y += 20
    return canvas.svg()


def _row(canvas: Canvas, left: float, y: float, width: float, cells: list[str]) -> None:
    """Draw a cell for each run of equal words. Equal words have one color."""
    names = [*dict.fromkeys(cells)]
    first = 0
    for rank in range(8):
        if rank == 7 or cells[rank + 1] != cells[first]:
            fill = FOUR[names.index(cells[first]) % 4]
            canvas.cell(left + width * first, y, width * (rank + 1 - first), 22, fill, cells[first])
            first = rank + 1


# Context parallelism


def context() -> str:
    """Return the picture of the chunks of a sequence over four ranks, and of the causal work that each rank has."""
    canvas = Canvas(690, 322, "Chunks of a sequence over four ranks, and the causal attention that each computes")
    side, left, top = 29, 74, 72
    owner = [min(chunk, 7 - chunk) for chunk in range(8)]
    canvas.text(left + 4 * side, 16, "keys, by chunk", anchor="middle")
    canvas.text(12, top - 26, "queries")
    for chunk in range(8):
        canvas.text(left + side * (chunk + 0.5), top - 12, str(chunk), anchor="middle")
        canvas.text(left - 14, top + side * (chunk + 0.5), str(chunk), anchor="middle")
        for key in range(8):
            x, y = left + side * key, top + side * chunk
            canvas.box(x, y, side, side, FOUR[owner[chunk]] if key < chunk else PAPER, line=FAINT)
            if key == chunk:
                corners = f"{_n(x)},{_n(y)} {_n(x)},{_n(y + side)} {_n(x + side)},{_n(y + side)}"
                canvas.parts.append(f'<polygon points="{corners}" fill="{FOUR[owner[chunk]]}"/>')
    canvas.text(352, 46, "rank", bold=True)
    canvas.text(404, 46, "chunks", bold=True)
    canvas.text(476, 46, "squares of attention", bold=True)
    for rank in range(4):
        y = top + 58 * rank
        canvas.text(366, y + 15, str(rank), anchor="middle")
        for place, chunk in enumerate((rank, 7 - rank)):
            canvas.cell(404 + 29 * place, y, 29, 29, FOUR[rank], str(chunk))
        first = rank + 0.5
        canvas.box(476, y, 12 * first, 29, FOUR[rank])
        canvas.box(476 + 12 * first, y, 12 * (8 - first), 29, FOUR[rank])
        canvas.text(582, y + 15, f"{first} + {8 - first} = 8")
    return canvas.svg()


DIAGRAMS: dict[str, Callable[[], str]] = {
    "strategies.svg": strategies,
    "fsdp_step.svg": step,
    "mesh.svg": mesh,
    "context.svg": context,
}


def main() -> None:
    for name, draw in DIAGRAMS.items():
        (IMAGES / name).write_text(draw())


if __name__ == "__main__":
    main()
