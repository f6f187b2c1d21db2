"""torch.export and ONNX of patched models, for every batch and length; the tables of docs/export.md."""

import re

import pytest
import torch
from helpers import exports
from helpers.paths import ROOT
from helpers.tiny_models import build, llama

from hf_linattn import available_patches
from hf_linattn.errors import LinattnError

PAGE = (ROOT / "docs" / "export.md").read_text()
EXACT, ROUNDED = 1e-9, 2e-4
PATCHES = sorted(available_patches())
onnx_noise = pytest.mark.filterwarnings("ignore")  # the exporter's dependencies warn of each other


def table():
    """patch -> (torch.export, ONNX), as the page has it."""
    rows = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            for name in re.findall(r"`([^`]+)`", cells[0]):
                assert name not in rows, name
                rows[name] = (cells[1], cells[2])
    return rows


def outcome(make, bound):
    """What a table says of a way to export: "yes", "with a mask" or "no".

    `make` exports with a mask or without and tells how far the program is from eager.
    """
    said = []
    for with_mask in (True, False):
        try:
            said.append(make(with_mask) < bound)
        except (LinattnError, torch.onnx.OnnxExporterError) as error:
            assert not with_mask or "attention_mask" not in str(error)
            said.append(False)
    return {(True, True): "yes", (True, False): "with a mask"}.get(tuple(said), "no")


SPECS = ["elu1", "logn", "softmax1", "gated", "window", "window+elu1", "window+gated"]


@pytest.mark.parametrize("spec", ["gated", "window", "window+elu1", "window+gated"])
def test_one_program_serves_every_batch_and_length(spec):
    model = exports.patched(spec, dtype=torch.float64)
    assert exports.farthest(exports.exported(model).module(), model) < EXACT


@pytest.mark.parametrize("spec", ["elu1", "window+elu1"])
def test_learned_positions(spec):
    model = exports.patched(spec, exports.gpt2(torch.float64), dtype=torch.float64)
    assert exports.farthest(exports.exported(model).module(), model) < EXACT


def test_an_encoder_with_a_window():
    model = exports.patched("window+elu1", exports.encoder(torch.float64), size=9)
    assert exports.farthest(exports.exported(model).module(), model) < EXACT


def test_rows_are_told_apart_without_a_mask_or_one_is_asked_for():
    model = exports.patched("softmax1+logn", dtype=torch.float64)
    assert exports.farthest(exports.exported(model, False).module(), model, False) < EXACT
    with pytest.raises(LinattnError, match="give it an attention_mask"):
        exports.exported(exports.patched("window"), False)


def test_kernels_are_not_exported(compiled):
    """HF_LINATTN_CPP=1: the program is of torch operations, and runs where this package is not."""
    model = exports.patched("window+elu1")
    program = exports.exported(model)
    assert not [node for node in program.graph.nodes if "hf_linattn" in str(node.target)]
    assert exports.farthest(program.module(), model) < ROUNDED


@onnx_noise
@pytest.mark.parametrize("spec", ["elu1", "logn", "window+elu1"])
def test_onnx(spec, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    model = exports.patched(spec)
    run = exports.runner(exports.to_onnx(model), tmp_path)
    assert exports.farthest(run, model) < ROUNDED


def test_the_table_names_every_patch():
    assert sorted(name for name in table() if "+" not in name) == PATCHES


@pytest.mark.full
@onnx_noise
@pytest.mark.parametrize("spec", sorted(table()))
def test_the_table(spec, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    exact, single = (exports.patched(spec, dtype=dtype) for dtype in (torch.float64, torch.float32))

    def by_torch(with_mask):
        return exports.farthest(exports.exported(exact, with_mask).module(), exact, with_mask)

    def by_onnx(with_mask):
        run = exports.runner(exports.to_onnx(single, with_mask), tmp_path)
        return exports.farthest(run, single, with_mask)

    assert (outcome(by_torch, EXACT), outcome(by_onnx, ROUNDED)) == table()[spec]
