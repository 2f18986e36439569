#!/usr/bin/env bash
# datasets 5.2.0 (with pandas 2 or 3): numbers in a column of type Json come back as others. load_dataset("json") makes
# such a column of objects with different keys, such as the arguments of tool calls, and decodes it by pandas' ujson,
# which rounds: 0.7 in the file is 0.7000000000000001 in the row. Columns without the type return 0.7.
#
# Output on 29 November 2026:
#   datasets 5.2.0
#   file 0.7, row 0.7000000000000001, of 9,999 numbers of four digits 3,049 differ
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0
HF_HOME="$folder/home" "$folder/venv/bin/python" - "$folder" <<'EOF'
import json, sys
import datasets

datasets.disable_progress_bars()
print("datasets", datasets.__version__)
file = sys.argv[1] + "/calls.jsonl"
with open(file, "w") as out:
    for number in range(1, 10_000):
        key = "a" if number % 2 else "b"  # different keys, so that the column is of type Json
        print(json.dumps({"arguments": {key: number / 10_000}}), file=out)
rows = datasets.load_dataset("json", data_files=file, split="train")
assert "Json" in str(rows.features), rows.features
found = [next(iter(row["arguments"].values())) for row in rows]
differ = sum(value != number / 10_000 for number, value in enumerate(found, start=1))
print(f"file 0.7, row {found[6999]!r}, of 9,999 numbers of four digits {differ:,} differ")
assert found[6999] == 0.7000000000000001 and differ, "the behaviour has changed"
EOF
