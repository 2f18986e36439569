#!/usr/bin/env bash
# dolma 1.2.1: a MemmapWriter to which no document was written keeps its whole preallocated file.
#
# The file is allocated for max_tokens, and has the size of what was written at the end, but not where that is nothing:
# then the .npy holds max_tokens tokens with the id 0, and the .csv.gz beside it no document. Seen on 29 November 2026,
# with max_tokens = 1000 and uint16:
#
#   written 3 tokens: 6 bytes
#   written 0 tokens: 2000 bytes
#
# Only the writer is imported, because dolma itself needs fasttext, nltk and others.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.3.4 msgspec==0.19.0 smart_open==7.3.1 typing_extensions==4.15.0
"$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/dolma" dolma==1.2.1
cd "$folder"
cat >empty.py <<'PYTHON'
import os
import sys
import types

import numpy as np

for name in ("dolma", "dolma.core", "dolma.tokenizer"):  # packages, without what their __init__ imports
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [os.path.join("dolma", *name.split("."))]

from dolma.tokenizer.data_types import TokenizerOutput
from dolma.tokenizer.memmap_writer import MemmapWriter

sizes = []
for documents in ([[5, 6, 7]], []):
    path = f"{len(documents)}.npy"
    with MemmapWriter(path, np.dtype("uint16"), max_tokens=1000) as writer:
        if documents:
            writer.write_many([TokenizerOutput.from_tokens("a", "a.jsonl", 1, ids) for ids in documents])
    sizes.append(os.path.getsize(path))
    print(f"written {sum(map(len, documents))} tokens: {sizes[-1]} bytes")
sys.exit(sizes != [6, 2000])
PYTHON
"$folder/venv/bin/python" empty.py
