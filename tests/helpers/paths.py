"""Folders of the repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "examples" / "base"
EXAMPLES = ROOT / "examples"
TOOLS = ROOT / "tools"
