"""Tiles that were measured on a device, in place of those that `tiles` chose by compiling.

`tools/gpu_kit/gpu_check.py` measures them and writes a table. The launcher reads a table that came with the
package, and one in the cache folder, whose rows win. A row holds for one device, one dtype of products, one
pair of widths and the very kernels that were timed: after a change of their sources, or of triton, it is not
used. Nothing is timed here.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_linattn.errors import DataError
from hf_linattn.ops import switches
from hf_linattn.ops.triton.tiles import Configuration, Tile, padded

FORMAT = "hf_linattn.tiles/1"
NAME = "tiles.json"
SHIPPED = Path(__file__).with_name(NAME)
LARGEST = Tile(chunk=256, block=256, warps=16, stages=8)


class Setting(NamedTuple):
    """What tiles are measured for.

    Attributes:
        device: its name, as the driver says it.
        operand: what products are computed in, as in `kernels`.
        head_dim: width of queries and keys, as kernels pad it.
        value_dim: width of values, likewise.
        grouped: several query heads share a key head.
        linked: there is decay, or there are documents.
    """

    device: str
    operand: str
    head_dim: int
    value_dim: int
    grouped: bool
    linked: bool


Table = dict[Setting, dict[str, Tile]]
"""Tiles by kernel, as `Configuration` names them."""
_given: list[Path] = []
_trial: dict[str, Tile] = {}
_changes = [0]


def setting(device: torch.device, operand: str, widths: tuple[int, int], group: int, linked: bool) -> Setting:
    """Name what a call is, as rows of a table do.

    Args:
        device: of its tensors.
        operand: what products are computed in.
        widths: of queries and keys, of values.
        group: query heads per key head.
        linked: there is decay, or there are documents.
    """
    return Setting(device_name(device), operand, padded(widths[0]), padded(widths[1]), group > 1, linked)


def measured(tiles: Configuration, *about: Any) -> Configuration:
    """Put measured tiles in the place of chosen ones, kernel by kernel; `about` as `setting` takes it."""
    table = _table()
    if not table and not _trial:
        return tiles
    found: dict[str, Any] = {**table.get(setting(*about), {}), **_trial}
    return tiles._replace(**found) if found else tiles


@contextmanager
def trial(tiles: Mapping[str, Tile]) -> Iterator[None]:
    """Use these tiles for every call meanwhile, whatever its setting: a candidate is tried."""
    before = dict(_trial)
    _trial.update(tiles)
    _changes[0] += 1
    try:
        yield
    finally:
        _trial.clear()
        _trial.update(before)
        _changes[0] += 1


def changes() -> int:
    """Count the changes of what `measured` answers: who remembers an answer compares."""
    _table()
    return _changes[0]


def use(path: Path) -> None:
    """Read one more table from now on, whose rows win.

    Raises:
        DataError: it is none, or damaged.
    """
    read(path)
    _given.append(path)
    _table.cache_clear()


def write(path: Path, table: Table) -> None:
    """Write a table, in one step; rows of other kernels are not kept."""
    rows = [
        {**where._asdict(), "tiles": {name: tile._asdict() for name, tile in own.items()}}
        for where, own in table.items()
    ]
    text = json.dumps({"format": FORMAT, "kernels": fingerprint(), "rows": rows}, indent=1)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


def digest(device: torch.device) -> str:
    """Say in a few letters which measured tiles a device has; nothing where it has none."""
    own = {str(where): tiles for where, tiles in _table().items() if where.device == device_name(device)}
    return hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()[:12] if own else ""


@functools.cache
def fingerprint() -> str:
    """Say in a few letters what the kernels are: their sources, and the triton that compiles them."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*kernel*.py"))]
    parts = [importlib.import_module("triton").__version__, *Configuration._fields, *sources]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@functools.cache
def device_name(device: torch.device) -> str:
    """Name a device as tables do."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@functools.cache
def _table() -> Table:
    """Collect the rows that hold for these kernels."""
    _changes[0] += 1
    paths = [SHIPPED]
    with suppress(RuntimeError):  # nobody's home
        paths.append(switches.cache_folder() / NAME)
    found: Table = {}
    for path in [*(path for path in paths if path.exists()), *_given]:
        try:
            found |= read(path)
        except DataError as error:
            warnings.warn(f"{error}; the tiles that were chosen by compiling are used", stacklevel=2)
    return found


def read(path: Path) -> Table:
    """Read the rows of a table; none where it was measured with other kernels.

    Raises:
        DataError: it is no table, or damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        if content["kernels"] != fingerprint():
            return {}
        found: Table = {}
        for row in content["rows"]:
            where = {name: row[name] for name in Setting._fields}
            found[Setting(**where)] = {name: _tile(name, own) for name, own in row["tiles"].items()}
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        what = f"{path} is no table of measured tiles of this version ({type(error).__name__}: {error})"
        raise DataError(f"{what}: delete it") from error


def _tile(name: str, own: dict[str, Any]) -> Tile:
    """Read one tile; every size is one that a launch can take."""
    tile = Tile(**own)
    if name not in Configuration._fields:
        raise ValueError(f"there is no kernel {name!r}")
    for size, largest in zip(tile, LARGEST, strict=True):
        if type(size) is not int or not 1 <= size <= largest:
            raise ValueError(f"{name} has the tile {tuple(tile)}")
    if any(size & (size - 1) for size in tile[:3]):
        raise ValueError(f"{name} has the tile {tuple(tile)}, not of powers of two")
    return tile
