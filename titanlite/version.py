"""Version of titanlite, and the folder of its files."""

from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).parent
