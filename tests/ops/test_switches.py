"""What users say by environment variables."""

import os

import pytest

from hf_linattn.errors import OptionError
from hf_linattn.ops.switches import said, switch

NAME = "HF_LINATTN_CPP"


@pytest.mark.parametrize("mapping", ["the system's", "another"])
def test_a_variable_is_read_as_it_is_now(mapping, monkeypatch):
    if mapping == "another":
        monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.delitem(os.environ, NAME, raising=False)
    assert (said(NAME), switch(NAME, "")) == ("", "auto")
    monkeypatch.setitem(os.environ, NAME, "0")
    assert (said(NAME), switch(NAME, "")) == ("0", "0")
    monkeypatch.setitem(os.environ, NAME, "")
    assert (said(NAME), switch(NAME, "")) == ("", "auto")
    monkeypatch.setitem(os.environ, NAME, "yes")
    with pytest.raises(OptionError, match="HF_LINATTN_CPP='yes': 1 does"):
        switch(NAME, "1 does")
