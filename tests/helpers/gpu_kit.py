"""The program of the GPU kit, imported from tools/, and what its stages are tried with."""

import importlib
import sys

from .paths import ROOT

FOLDER = ROOT / "tools" / "gpu_kit"


def module(name):
    """A module of the kit: gpu_check, build, gpu_stages.work, ..."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)


def dry_run(stage, folder, kit=FOLDER, keep=None):
    """Do a stage with tiny sizes in this process; return its rows."""
    gpu_check, work = module("gpu_check"), module("gpu_stages.work")
    context = work.Context(True, "cpu", folder, kit)
    if keep is not None:
        found = importlib.import_module(f"gpu_stages.{stage}")
        cases, found.cases = found.cases, lambda context: [x for x in cases(context) if keep(x.case)]
    try:
        assert work.do(stage, context) == 0
    finally:
        if keep is not None:
            found.cases = cases
    return list(gpu_check.read(folder / f"{stage}.jsonl").values())


def check_correct(folder):
    """In the interpreter: a form, one of a window, a size with all that there is, and a token."""
    rows = dry_run("correct", folder)
    assert [row["ok"] for row in rows] == [True] * 4, rows
    sizes = [row for row in rows if row["case"]["case"] == "size"]
    assert all(row["same_bits"] and 0 < row["worst"] < row["allowed"] for row in sizes)
    assert set(sizes[0]["errors"]) == {"output", "total", "S", "z", "d_query", "d_key", "d_value"}


def check_wrong_kernels_are_rows(folder):
    """Kernels that lie, that raise, or that differ from run to run do not end the stage."""
    from hf_linattn.ops import linear_attention

    correct = module("gpu_stages.correct")
    attention, runs = linear_attention.attention, []

    def lying(inputs, config, keep, backend=None):
        outputs = attention(inputs, config, keep, backend)
        return outputs._replace(S=outputs.S * 1.001)

    def unsteady(inputs, config, keep, backend=None):
        runs.append(1)
        outputs = attention(inputs, config, keep, backend)
        return outputs._replace(z=outputs.z * (1 + 1e-6 * len(runs)))

    size = correct.Size("float32", 16, 16, 1, 9, False, False)
    context = module("gpu_stages.work").Context(True, "cpu", folder, FOLDER)
    try:
        linear_attention.attention = lying
        assert correct.size_row(context, size)["error"].startswith("S is 1.0")
        linear_attention.attention = unsteady
        assert "differ in their bits" in correct.size_row(context, size)["error"]
    finally:
        linear_attention.attention = attention
    assert "error" not in correct.size_row(context, size)
    alone = size._replace(length=1)  # gradients of its query and key are 0 but for rounding
    row = correct.size_row(context, alone)
    assert "error" not in row, row
    assert max(row["errors"][name] for name in ("d_query", "d_key")) < 1e-6


KERNEL_CASES = (
    "machine",
    "ours",
    "window, sinks and sums, ours",
    "window+gated, ours",
    "tiles",
    "fla, raw",
)


def check_kernels(folder):
    """In the interpreter: forms and windows have rows, and a table of tiles that the launcher reads."""
    from hf_linattn.ops.triton import measured_tiles

    tiles = module("gpu_stages.tiles")
    tiles.GAIN, gain = 1e9, tiles.GAIN  # whatever is measured is taken, so that there is a table
    median, took = tiles._sample, iter([2.0, 1.0] * 2)
    tiles._sample = lambda *about: next(took)
    try:
        rows = dry_run("kernels", folder, keep=lambda case: case["case"] in KERNEL_CASES)
    finally:
        tiles.GAIN, tiles._sample = gain, median
    assert all(row["ok"] for row in rows), rows
    assert {row["case"]["case"] for row in rows} == set(KERNEL_CASES)
    by_name = {row["case"]["case"]: row for row in rows if "token" not in row["case"]}
    assert all(by_name[name]["both"] > 0 for name in ("ours", "window, sinks and sums, ours"))
    (token,) = (row for row in rows if row["case"]["case"] == "window+gated, ours")
    assert token["token"] > 0
    assert token["bytes"] == 4 * (2 * 9 * 16 + 2 * (16 * 16 + 16))  # the window, the state read and written
    assert by_name["fla, raw"]["skipped"] == "fla's kernels run on CUDA only"
    (where,) = table = measured_tiles.read(folder / "tiles.json")
    assert (where.operand, where.head_dim, where.grouped) == ("ieee", 16, False)
    measured = [row for row in rows if row["case"]["case"] == "tiles"]
    names = [next(iter(row["best"])) for row in measured]
    assert [name.startswith("window") for name in names] == [False, True]
    # one row of the table has tiles of both
    both = measured[0]["best"] | measured[1]["best"]
    assert {name: list(tile) for name, tile in table[where].items()} == both
    assert all(row[f"{name}_gain"] == 2 for row, name in zip(measured, names, strict=True))


def check_neighbours():
    """Blocks of a window's walks are tokens and may be wider than heads; all others are columns."""
    from hf_linattn.ops.triton.tiles import Tile

    tiles = module("gpu_stages.tiles")
    for name, widest in (("outputs", 64), ("window_step", 64), ("window_outputs", 128)):
        assert max(tile.block for tile in tiles.neighbours(name, Tile(64, 64, 4, 2), 64, False)) == widest


def check_tiles_that_fail(folder):
    """A candidate that raises is noted, and tiles whose results are wrong are not put into the table."""
    tiles, selftest = module("gpu_stages.tiles"), module("hf_linattn.ops.triton.selftest")
    sample, disagreement = tiles._sample, selftest.disagreement
    context = module("gpu_stages.work").Context(True, "cpu", folder, FOLDER)
    answers = iter([2.0, RuntimeError("out of resource: shared memory"), 2.0, 1.0])

    def answer(*about):
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    try:
        tiles._sample, selftest.disagreement = answer, lambda *about: "output is far"
        row = tiles._row(context, tiles.TINY)
        assert row["best"] == {}
        assert "shared memory" in row["candidates"][-1][2]
        row = tiles._row(context, tiles.TINY)
        assert "output is far; they are not in the table" in row["error"]
    finally:
        tiles._sample, selftest.disagreement = sample, disagreement
    assert not (folder / "tiles.json").exists()
