"""What tests of attention share."""

import contextlib

import pytest
import torch


@pytest.fixture
def meta(monkeypatch):
    """Autocast, which torch does not know on that device, is off."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: contextlib.nullcontext())
    return torch.device("meta")
