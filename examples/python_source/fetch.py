"""Fetch released packages, and write their Python source as train.jsonl and validation.jsonl.

    python examples/python_source/fetch.py [FOLDER]

packages.txt names the packages, with versions and hashes, so each run of this script writes the same bytes. Folders of
tests are left out. Source: pip's hash-checking mode, https://pip.pypa.io/en/stable/topics/secure-installs/
"""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGES = Path(__file__).with_name("packages.txt")


def texts_of(wheel: Path) -> list[dict[str, str]]:
    """Return the Python files of a wheel, sorted by name."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".py"))
        kept = [name for name in names if not {"test", "tests", "testing"} & set(name.split("/"))]
        texts = [(name, archive.read(name).decode("utf-8", errors="ignore")) for name in kept]
    return [{"text": text, "path": f"{wheel.stem}/{name}"} for name, text in texts if text.strip()]


def main() -> None:
    folder = Path(sys.argv[1] if sys.argv[1:] else "outputs/python_source")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    train, validation = PACKAGES.read_text().split("# for validation")
    for name, packages in (("train", train), ("validation", validation)):
        wheels = folder / name
        wheels.mkdir(parents=True, exist_ok=True)
        requirements = wheels / "packages.txt"
        requirements.write_text(packages)
        subprocess.run([*pip, "--require-hashes", "--dest", wheels, "--requirement", requirements], check=True)
        lines = [json.dumps(text) for wheel in sorted(wheels.glob("*.whl")) for text in texts_of(wheel)]
        file = folder / f"{name}.jsonl"
        file.write_text("".join(f"{line}\n" for line in lines))
        size = sum(len(json.loads(line)["text"].encode()) for line in lines)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        print(f"{file}: {len(lines):,} files, {size:,} bytes of text, sha256 {digest}")


if __name__ == "__main__":
    main()
