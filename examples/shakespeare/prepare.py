"""Split tiny Shakespeare as nanoGPT does, and write a tokenizer of its 65 characters.

    python examples/shakespeare/prepare.py INPUT.txt [FOLDER]

The first 1,003,854 characters are for training, the other 111,540 for validation. Source of the text, and of the split:
https://github.com/karpathy/nanoGPT/blob/master/data/shakespeare_char/prepare.py
"""

import hashlib
import json
import sys
from pathlib import Path

SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
OF_TRAINING = 1_003_854
"""Characters."""


def tokenizer_of(text: str) -> str:
    """Return a tokenizer.json: each character of a text is a token, and there are no others."""
    vocabulary = {character: number for number, character in enumerate(sorted(set(text)))}
    each = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    parts = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": each,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": next(iter(vocabulary))},
    }
    return json.dumps(parts, indent=1)


def main() -> None:
    content = Path(sys.argv[1]).read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        sys.exit(f"{sys.argv[1]} is another text: its sha256 is {found}, and should be {SHA256}")
    text = content.decode()
    folder = Path(sys.argv[2] if sys.argv[2:] else "outputs/shakespeare")
    folder.mkdir(parents=True, exist_ok=True)
    parts = {
        "train.txt": text[:OF_TRAINING],
        "passes.txt": 3 * text[:OF_TRAINING],  # row B: sequences begin elsewhere in each pass
        "validation.txt": text[OF_TRAINING:],
        "tokenizer.json": tokenizer_of(text),
    }
    for name, part in parts.items():
        (folder / name).write_text(part)
    print(f"{folder}: {OF_TRAINING:,} characters to train on, {len(text) - OF_TRAINING:,} to validate")


if __name__ == "__main__":
    main()
