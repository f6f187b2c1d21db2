"""What the launcher does with a table of measured tiles, in Triton's interpreter; see `triton_checks`."""

import torch

from hf_linattn.ops import linear_attention
from hf_linattn.ops.triton import measured_tiles, problem
from hf_linattn.ops.triton.tiles import Tile
from hf_linattn.ops.types import Inputs, OpConfig


def check_a_launch_takes_measured_tiles(folder):
    """The tile of the table is that of the launch, and the result the same but for rounding."""
    inputs = Inputs(*torch.randn(3, 1, 2, 70, 16))
    seen, launch = [], problem.Launches.launch

    def watched(self, kernel, grid, tile, *arguments):
        seen.append((kernel.__name__, tile))
        launch(self, kernel, grid, tile, *arguments)

    def output():
        seen.clear()
        return linear_attention.attention(inputs, OpConfig("elu1"), False, "triton").output

    problem.Launches.launch = watched
    try:
        before, chosen = output(), dict(seen)["outputs"]
        tile = Tile(chosen.chunk * 2, chosen.block, 1, 1)
        where = measured_tiles.setting(inputs.query.device, "ieee", (16, 16), 1, False)
        measured_tiles.write(folder / "tiles.json", {where: {"outputs": tile}})
        measured_tiles.use(folder / "tiles.json")
        after = output()
        assert dict(seen)["outputs"] == tile
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    finally:
        problem.Launches.launch = launch
        measured_tiles._given.clear()
        measured_tiles._table.cache_clear()
