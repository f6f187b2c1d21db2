"""Tests never reach for a hub and use one thread each, also when pytest is started by hand."""

import os

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")
