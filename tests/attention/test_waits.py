"""How often Python waits for the device: once for each mask, however many layers there are."""

import traceback

import pytest
import torch
from helpers.tiny_models import llama
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from hf_linattn import patch_model
from hf_linattn.errors import UnsupportedMaskError

READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal.default", "masked_select", "unique")


class Waits(TorchDispatchMode):
    """Count the values that are read from tensors, apart from forms that run on CPUs alone."""

    def __enter__(self):
        self.count, self.tolist = 0, torch.Tensor.tolist

        def tolist(x):
            self.count += 1
            return self.tolist(x)

        torch.Tensor.tolist = tolist
        return super().__enter__()

    def __exit__(self, *error):
        torch.Tensor.tolist = self.tolist
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(name in str(function) for name in READS):
            self.count += not any("eager" in frame.filename for frame in traceback.extract_stack())
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model():
    return patch_model(llama(layers=3).eval(), "elu1")


class Text:
    """Calls of a model on pieces of one text."""

    def __init__(self, model, mask):
        self.model, self.mask, self.seen = model, mask, 0
        self.cache = DynamicCache(config=model.config)

    def waits(self, length, **options):
        mask = None if self.mask is None else self.mask[:, : self.seen + length]
        rows = 2 if mask is None else mask.shape[0]
        ids = torch.arange(rows * length).view(rows, length) % 90
        with Waits() as waits, torch.no_grad():
            self.model(ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, **options)
        self.seen += length
        return waits.count


def padded(left, length=20):
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :left] = 0
    return mask


@pytest.mark.parametrize(("mask", "count"), [(None, 0), (padded(0), 1), (padded(3), 1), (padded(9), 1)])
def test_one_for_each_forward(model, mask, count):
    text = Text(model, mask)
    assert [text.waits(length) for length in (7, 1, 1, 4)] == [count] * 4


def test_in_inference_mode_too(model):
    with torch.inference_mode():
        text = Text(model, padded(3))
        assert [text.waits(length) for length in (7, 1, 1)] == [1, 1, 1]


def test_rows_that_change_places(model):
    text = Text(model, padded(3))
    text.waits(7)
    text.cache.reorder_cache(torch.tensor([1, 0]))
    text.mask = text.mask.flip(0)
    assert text.waits(1) == 1
    text.cache.batch_repeat_interleave(2)
    text.mask = text.mask.repeat_interleave(2, 0)
    assert text.waits(1) == 1
    text.cache.batch_select_indices(torch.tensor([0, 2, 3]))
    text.mask = text.mask[[0, 2, 3]]
    assert text.waits(1) == 1
    text.mask = text.mask.flip(0)
    with pytest.raises(UnsupportedMaskError, match="other past tokens"):
        text.waits(1)


def test_layers_whose_masks_are_made_for_another_ask_once_more_together():
    text = Text(patch_model(llama(layers=4).eval(), {"1-3": "elu1"}), padded(3))
    assert [text.waits(length) for length in (7, 1, 1)] == [1, 2, 2]


def test_packed_rows():
    counts = []
    for layers in (2, 5):
        model = patch_model(llama(layers=layers).eval(), "elu1")
        places = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]])
        with Waits() as waits, torch.no_grad():
            model(torch.arange(9)[None], position_ids=places, use_cache=False)
        counts.append(waits.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("inference", [False, True])
def test_a_state_that_has_seen_other_tokens_is_found_among_those_that_have_not(model, inference):
    with torch.inference_mode(inference):
        text, other = Text(model, padded(3)), Text(model, padded(2))
        for each in (text, other):
            each.waits(7)
        text.cache.layers[1] = other.cache.layers[1]
        with pytest.raises(UnsupportedMaskError, match="other past tokens"):
            text.waits(1)
        text, unpadded = Text(model, padded(3)), Text(model, None)
        for each in (text, unpadded):
            each.waits(7)
        text.cache.layers[2] = unpadded.cache.layers[2]
        with pytest.raises(UnsupportedMaskError, match="other past tokens"):
            text.waits(1)


def test_a_mask_that_changes_is_found(model):
    text = Text(model, padded(3))
    text.waits(7)
    for wrong in (padded(4), padded(0)):
        text.mask = wrong
        with pytest.raises(UnsupportedMaskError, match="other past tokens"):
            text.waits(1)
    text.mask = None
    with pytest.raises(UnsupportedMaskError, match="other past tokens"):
        text.waits(1)
