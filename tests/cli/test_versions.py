"""Packages in versions that are too old or newer than tried: one line each, before anything else fails."""

import sys
from importlib import metadata

import pytest

from hf_linattn.cli.main import exit_status
from hf_linattn.cli.versions import check_versions, installed, requirements
from hf_linattn.errors import LinattnError, VersionError

real = metadata.version


@pytest.fixture(autouse=True)
def read_anew():
    installed.cache_clear()
    yield
    installed.cache_clear()


@pytest.fixture
def pretend(monkeypatch):
    def other(**versions):
        monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or real(name))

    return other


def test_what_is_installed_here_is_right():
    for extra in ("", "train", "eval", "trl", "serve"):
        check_versions(extra)
    assert {each.name for each in requirements("")} == {"torch", "transformers"}
    assert {"accelerate", "trl"} <= {each.name for each in requirements("trl")}


def test_too_old_is_one_line(pretend, capsys):
    pretend(transformers="5.1.0", trl="1.2")
    message = r"^hf_linattn needs transformers<5\.25,>=5\.17, and 5\.1\.0 is installed: pip install '.*'$"
    with pytest.raises(VersionError, match=message):
        check_versions()
    assert VersionError.__bases__ == (LinattnError, ImportError)
    assert exit_status(sys.exit, interrupted="", extra="trl") == 1
    assert capsys.readouterr().err.startswith("error: hf_linattn needs trl<2,>=1.10, and 1.2 is installed")


def test_newer_than_tried_is_a_warning(pretend):
    pretend(trl="2.0.1", transformers="5.25.0")
    with pytest.warns(UserWarning, match="was tried with trl<2,>=1.10, and 2.0.1 is installed"):
        check_versions("trl")
    with pytest.raises(VersionError, match=r"and 5\.25\.0 is installed"):  # it may have other names
        check_versions()


def test_an_extra_that_is_not_installed_is_no_error(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    check_versions("train")


def test_a_checkout_that_pip_does_not_know_is_no_error(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    check_versions()
