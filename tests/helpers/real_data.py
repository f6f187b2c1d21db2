"""Real models and texts for tests: in `HF_LINATTN_DATA`, else in `shared/data` beside the checkout."""

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("HF_LINATTN_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
needs_data = pytest.mark.skipif(
    not (DATA / "models").is_dir(), reason=f"no real models: {DATA} is no such folder (set HF_LINATTN_DATA)"
)
