"""Makes modules of tests/ importable for benchmarks that are run as scripts."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

sys.path.insert(0, str(ROOT))
