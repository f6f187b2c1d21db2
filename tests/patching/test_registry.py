"""Names of attributes that have changed: a patch that defines an old one is told the new one."""

import pytest
from helpers import learned_patches

from hf_linattn import register, registry
from hf_linattn.attention import LinearAttention
from hf_linattn.errors import RegistrationError


@pytest.fixture(autouse=True)
def renamed(monkeypatch):
    monkeypatch.setattr(registry, "RENAMED_IN_0_3", {"old_name": "new_name", "old_method": "new_method"})


class Named(LinearAttention):
    """Defines an attribute by its old name."""

    old_name = True


class Defined(LinearAttention):
    """Defines a method by its old name."""

    def old_method(self):
        """Do nothing."""


class Inherits(Named):
    """Defines nothing itself."""


class Current(LinearAttention):
    """Defines what there is today."""

    new_name = True


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Named, "'tried': Named defines 'old_name', which is called 'new_name' since version 0.3.0"),
        (Defined, "'tried': Defined defines 'old_method', which is called 'new_method' since version 0.3.0"),
    ],
)
def test_an_attribute_with_its_old_name_is_refused(cls, message):
    with pytest.raises(RegistrationError, match=message):
        register("tried")(cls)
    assert "tried" not in registry.patches()
    assert cls.name != "tried"


@pytest.mark.parametrize("cls", [Current, Inherits])
def test_only_what_the_class_itself_defines_counts(cls):
    with learned_patches.registered(cls, "tried"):
        assert registry.find("tried") is cls
