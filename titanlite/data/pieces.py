"""Cut long texts into pieces that tokenizers encode one by one, and join the token ids."""

from collections.abc import Iterable, Iterator

import numpy as np

PIECE_BYTES = 2**18
"""Longer texts are encoded in pieces. On one pretoken of this length (letters, spaces, dashes, emoji and others; on two
shared CPU cores) tiktoken 0.13 and 0.14 take 0.2 s at most, 0.8 s a MB, and tokenizers 0.23 takes 0.5 s, 1.8 s a MB. On
1 MB of spaces tiktoken fails: its stack is full. Before 0.13 it took 20 s to 55 s for a pretoken of this length."""
CUT_RULE = "cut1"
"""Name of the rule in fingerprints: change it whenever `cut` or PIECE_BYTES changes."""


def cut(text: bytes, start: int = 0) -> int:
    """Return the end of the piece of UTF-8 text that begins at `start`.

    It is the last line break in reach with a visible ASCII character after it. There the split patterns of Llama 3 and
    the like always begin a new pretoken, so that ids are those of the whole text. (GPT-2's own pattern looks one
    character past blank lines: one token may differ there.) Where there is none, the piece is as long as it may be.

    Looks at no more than text[start : start + PIECE_BYTES + 1], so that text can be cut while it is read. The pieces of
    a text that ends where a piece does are the first pieces of the whole: that is why no piece has less than 4 bytes,
    of which 3 are what the last character of a piece may lack.
    """
    end = start + PIECE_BYTES
    if len(text) <= end:
        return len(text)
    newline = text.rfind(b"\n", start + 3, end)
    while newline >= 0:
        if 0x21 <= text[newline + 1] <= 0x7E:
            return newline + 1
        newline = text.rfind(b"\n", start + 3, newline)
    return next((at for at in range(end, end - 4, -1) if text[at] & 0xC0 != 0x80), end)


def pieces(text: str) -> Iterator[str]:
    """Yield the pieces of a text; none for an empty text."""
    data = text.encode()
    start = 0
    while start < len(data):
        end = cut(data, start)
        yield text if end - start == len(data) else data[start:end].decode()
        start = end


def joined(ids: Iterable[np.ndarray]) -> np.ndarray:
    """Concatenate the token ids of pieces; uint32 also for none."""
    ids = list(ids)
    return ids[0] if len(ids) == 1 else np.concatenate([np.empty(0, dtype=np.uint32), *ids])
