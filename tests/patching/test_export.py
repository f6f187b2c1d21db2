"""torch.export and ONNX of patched models, for every batch and length; the table of docs/export.md."""

import re

import pytest
import torch
from helpers import exports
from helpers.paths import ROOT
from helpers.selection import rest_full
from helpers.tiny_models import llama
from transformers import DynamicCache
from transformers.integrations.executorch import convert_and_export_with_cache

from hf_linattn import available_patches, patch_model
from hf_linattn.errors import LinattnError, UnsupportedCallError

EXACT, ROUNDED = 1e-9, 2e-4
"""Distances of logits to eager's: in float64, and in float32."""
full = pytest.mark.full
WAYS = ("torch.export", "ONNX")


def table():
    """patch -> what the page says of both ways, "yes" or what stops it."""
    rows = {}
    for line in (ROOT / "docs" / "export.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            for name in re.findall(r"`([^`]+)`", cells[0]):
                assert name not in rows, name
                rows[name] = dict(zip(WAYS, cells[1:], strict=True))
    return rows


def distances(spec, folder):
    """How far the program and the ONNX model are from eager, float32; texts where there is none."""
    model = exports.patched(spec)
    try:
        program = exports.exported(model)
    except LinattnError as error:
        return dict.fromkeys(WAYS, str(error))
    found = {"torch.export": exports.farthest(program.module(), model)}
    try:
        found["ONNX"] = exports.farthest(exports.runner(exports.to_onnx(program), folder), model)
    except torch.onnx.OnnxExporterError as error:
        found["ONNX"] = str(error)
    return found


def check(spec, folder):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    said, found = table()[spec], distances(spec, folder)
    for way in WAYS:
        if said[way] == "yes":
            assert found[way] < ROUNDED, (way, found[way])
        else:
            assert said[way].removeprefix("no: ") in str(found[way])


@full
@pytest.mark.parametrize(
    ("spec", "options"),
    [("window+gated", {}), ("window+elu1", {"sinks": 0, "size": 9})],
)
@pytest.mark.parametrize("family", [exports.gpt2, llama, exports.encoder])
def test_one_program_serves_every_batch_and_length(spec, options, family):
    if family is exports.encoder and "gated" in spec:
        pytest.skip("gates forget, an encoder does not")
    model = exports.patched(spec, family(dtype=torch.float64), **options)
    assert exports.farthest(exports.exported(model).module(), model) < EXACT


def test_without_a_mask():
    model = exports.patched("softmax1+logn", dtype=torch.float64)
    assert exports.farthest(exports.exported(model, False).module(), model, False) < EXACT
    with pytest.raises(LinattnError, match="give it an attention_mask"):
        exports.exported(exports.patched("window"), False)


class Continued(torch.nn.Module):
    """A forward behind a cache that it holds."""

    def __init__(self, model, past):
        super().__init__()
        self.model, self.past = model, past

    def forward(self, input_ids):
        return self.model(input_ids, past_key_values=self.past).logits


@torch.no_grad()
def test_a_state_is_not_exported_as_if_it_were_a_constant():
    model, cache = exports.patched("elu1").model, DynamicCache()
    ids = exports.batch(2, 20, 0)[0]
    model(ids[:, :19], past_key_values=cache)
    with pytest.raises(UnsupportedCallError, match="cannot be exported behind a cache"):
        torch.export.export(Continued(model, cache), (ids[:, 19:],))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_static_cache_is_no_place_for_a_state_in_a_program():
    """transformers' recipe for ExecuTorch: the tokens before are an input, whose number is not known."""
    model = exports.patched("elu1").model
    static = {"cache_implementation": "static", "cache_config": {"batch_size": 1, "max_cache_len": 8}}
    model.generation_config.update(**static)
    with pytest.raises(Exception, match=r"LlamaAttention 0: .*Pass use_cache=False and the whole text"):
        convert_and_export_with_cache(model)


def test_kernels_in_cpp_are_not_exported(monkeypatch):
    monkeypatch.setenv("HF_LINATTN_CPP", "1")
    model = exports.patched("window+elu1")
    program = exports.exported(model)
    assert not [node.target for node in program.graph.nodes if "hf_linattn" in str(node.target)]
    monkeypatch.setenv("HF_LINATTN_CPP", "0")
    assert exports.farthest(program.module(), model) < ROUNDED


@full
@pytest.mark.filterwarnings("ignore")  # the exporter's dependencies warn of each other
@pytest.mark.parametrize("second", ["elu1", ("window+gated", {"size": 8, "sinks": 2})], ids=str)
def test_onnx_of_layers_of_both_kinds(second, tmp_path):
    """Two layers: what padded rows hold must not reach the others in the second."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    plan = {"0": "softmax1+logn", "1": second}
    model = exports.Logits(patch_model(llama(dtype=torch.float32), plan)).eval()
    run = exports.runner(exports.to_onnx(exports.exported(model)), tmp_path)
    assert exports.farthest(run, model) < ROUNDED


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spec", ["softmax1", "elu1", "window+gated"])
def test_torch_jit_is_refused(spec):
    """It would leave the mask out that has no padding in the example, and what kernels have written."""
    model, ids = exports.patched(spec), torch.arange(40).view(2, 20)
    advice = r"layers\.0\.self_attn.*torch\.jit\.trace.*Take torch\.export"
    with pytest.raises(UnsupportedCallError, match=advice):
        torch.jit.trace(model, (ids, torch.ones_like(ids)))


def test_the_table_names_every_patch():
    assert sorted(table()) == sorted(available_patches())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spec", rest_full(sorted(available_patches()), ["elu1"]))
def test_the_table(spec, tmp_path):
    check(spec, tmp_path)
