"""Versions of other packages, held against what this package's own metadata asks for."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from hf_linattn.errors import VersionError

NAME = "hf-linattn"
LOWER = (">", ">=", "==", "~=")


@functools.cache  # every patched model notes some, and reading one takes a millisecond
def installed(package: str) -> str | None:
    """Tell the version of a package, named as pip knows it; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def requirements(extra: str) -> Iterator[Requirement]:
    """List what an extra asks for, "" for the package itself; nothing where it was not installed by pip."""
    try:
        lines = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        return
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        active = marker is None or marker.evaluate({"extra": extra})
        wanted = active and not (extra and always)
        if wanted and requirement.name == NAME:
            for other in requirement.extras:
                yield from requirements(other)
        elif wanted:
            yield requirement


def check_versions(extra: str = "") -> None:
    """Refuse packages that are older than an extra asks for, and warn of newer ones; skip missing ones.

    Of what the package itself needs, newer ones are refused too: it reads transformers' own source, and a
    release can rename what it looks for, as 5.24 did with the arguments by which caches are handed on.

    Args:
        extra: of this package; "" for the package itself.

    Raises:
        VersionError: one is too old, or too new.
    """
    for requirement in requirements(extra):
        version = installed(requirement.name)
        if version is None:
            continue
        failing = [each for each in requirement.specifier if not each.contains(version, prereleases=True)]
        if not failing:
            continue
        asked = f"{requirement.name}{requirement.specifier}"
        if not extra or any(each.operator in LOWER for each in failing):
            raise VersionError(f"hf_linattn needs {asked}, and {version} is installed: pip install '{asked}'")
        warnings.warn(f"hf_linattn was tried with {asked}, and {version} is installed", stacklevel=2)
