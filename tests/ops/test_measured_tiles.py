"""Tables of measured tiles: which calls they are for, and what is not believed."""

import json

import pytest
import torch
from helpers import triton_tile_checks as checks

from hf_linattn.errors import DataError
from hf_linattn.ops.triton import launch, measured_tiles
from hf_linattn.ops.triton.measured_tiles import Setting
from hf_linattn.ops.triton.tiles import Tile, configuration, segment_length

pytestmark = pytest.mark.skipif(
    not launch.available("cuda"), reason="triton is not installed: pip install triton"
)

CHOSEN = configuration(64, 64, 1, "bf16", (8, 0))
ABOUT = (torch.device("cpu"), "bf16", (64, 48), 1, False)
OTHERS = [
    (torch.device("meta"), *ABOUT[1:]),
    (*ABOUT[:1], "fp16", *ABOUT[2:]),
    (*ABOUT[:2], (64, 128), *ABOUT[3:]),
    (*ABOUT[:3], 4, False),
    (*ABOUT[:4], True),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, and nothing known from before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured_tiles, "_given", [])
    measured_tiles._table.cache_clear()
    yield tmp_path / "hf_linattn"
    measured_tiles._table.cache_clear()


def test_a_table_in_the_cache_folder_holds_for_its_setting_alone(folder):
    assert measured_tiles.measured(CHOSEN, *ABOUT) is CHOSEN
    assert measured_tiles.digest(ABOUT[0]) == ""
    tile = Tile(16, 32, 2, 3)
    folder.mkdir()
    measured_tiles.write(folder / "tiles.json", {measured_tiles.setting(*ABOUT): {"outputs": tile}})
    measured_tiles._table.cache_clear()
    assert measured_tiles.measured(CHOSEN, *ABOUT) == CHOSEN._replace(outputs=tile)
    assert [measured_tiles.measured(CHOSEN, *about) for about in OTHERS] == [CHOSEN] * len(OTHERS)
    # a verdict of the check is of these tiles
    assert measured_tiles.digest(ABOUT[0]) != ""
    assert measured_tiles.digest(torch.device("meta")) == ""


def test_a_table_of_other_kernels_is_not_used(folder, monkeypatch):
    folder.mkdir()
    table = {measured_tiles.setting(*ABOUT): {"outputs": Tile(16, 32, 2, 3)}}
    with monkeypatch.context() as before:
        before.setattr(measured_tiles, "fingerprint", lambda: "of older sources")
        measured_tiles.write(folder / "tiles.json", table)
    assert measured_tiles.measured(CHOSEN, *ABOUT) == CHOSEN
    measured_tiles.write(folder / "given.json", table)
    measured_tiles.use(folder / "given.json")
    assert measured_tiles.measured(CHOSEN, *ABOUT) != CHOSEN


@pytest.mark.parametrize(
    "wrong",
    [
        "{",
        "[]",
        '{"format": "other"}',
        {"outputs": {"chunk": 48, "block": 32, "warps": 4, "stages": 1}},
        {"outputs": {"chunk": 512, "block": 32, "warps": 4, "stages": 1}},
        {"outputs": {"chunk": 16, "block": 32, "warps": True, "stages": 1}},
        {"outputs": {"chunk": 16, "block": 32, "warps": 4}},
        {"inputs": {"chunk": 16, "block": 32, "warps": 4, "stages": 1}},
    ],
    ids=str,
)
def test_a_damaged_table_is_said_and_not_used(folder, wrong):
    folder.mkdir()
    path, text = folder / "tiles.json", wrong
    if isinstance(wrong, dict):
        row = measured_tiles.setting(*ABOUT)._asdict() | {"tiles": wrong}
        content = {"format": measured_tiles.FORMAT, "kernels": measured_tiles.fingerprint(), "rows": [row]}
        text = json.dumps(content)
    path.write_text(text)
    with pytest.warns(UserWarning, match=r"no table of measured tiles.*delete it.*chosen by compiling"):
        assert measured_tiles.measured(CHOSEN, *ABOUT) == CHOSEN
    with pytest.raises(DataError, match="delete it"):
        measured_tiles.use(path)


def test_devices_have_tiles_of_their_own():
    def outputs(*about):
        return configuration(*about).outputs

    of_amd, of_others = outputs(128, 128, 1, "bf16", (0, 0)), outputs(128, 128, 1, "bf16", (8, 6))
    assert (of_amd.chunk, of_others.chunk) == (32, 16)
    alone, grouped = (configuration(128, 128, n, "bf16", (8, 6)) for n in (1, 4))
    assert alone.gradient_rows != grouped.gradient_rows  # heads that share keys have tiles of their own too
    # they were compiled without decay
    assert outputs(128, 128, 1, "bf16", (0, 0), True) == outputs(128, 128, 1, "bf16", (8, 6), True)
    assert outputs(64, 16, 1, "bf16", (0, 0)).block == 16  # no wider than values
    assert outputs(64, 64, 1, "bf16", (13, 0)) == outputs(64, 64, 1, "bf16", (8, 6))  # not seen yet


def test_a_trial_is_over_afterwards(folder):
    with measured_tiles.trial({"step": Tile(1, 8, 1, 1)}):
        assert measured_tiles.measured(CHOSEN, *ABOUT).step == Tile(1, 8, 1, 1)
    assert measured_tiles.measured(CHOSEN, *ABOUT) is CHOSEN


def test_settings_are_of_padded_widths():
    assert measured_tiles.setting(*ABOUT) == Setting("cpu", "bf16", 64, 64, False, False)


def test_a_launch_takes_measured_tiles(interpreted, tmp_path):
    interpreted(checks.check_a_launch_takes_measured_tiles, tmp_path)


@pytest.mark.parametrize("processors", [108, 132, 148, 304])
@pytest.mark.parametrize("programs", [1, 8, 32, 64, 100, 256, 600])
def test_segments_fill_a_device_and_no_program_waits_for_the_others(processors, programs):
    for length in (1024, 5000, 32768):
        segment = segment_length(length, programs, processors, 64)
        segments = -(-length // segment)
        assert segment % 64 == 0
        assert segments == 1 or segments * programs <= 2 * processors
        # as many as that allows, but for rounding to whole segments
        assert (segment - 64) * max(2 * processors // programs, 1) < length
