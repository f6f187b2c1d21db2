"""The training loop itself: rows that a preparation makes anew."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from hf_linattn.training.loop import LoopSettings, TrainingLoop


class Table(nn.Module):
    """One number per token id; the loss of a row is their mean."""

    def __init__(self):
        super().__init__()
        self.numbers = nn.Parameter(torch.arange(8.0))


def mean_of_rows(model, batch):
    return model.numbers[batch.long()].mean(1)


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_a_preparation_may_cut_rows_into_pieces(pieces, tmp_path):
    blocks = np.arange(32, dtype=np.int32).reshape(4, 8) % 8
    loop = TrainingLoop(
        Accelerator(cpu=True),
        Table(),
        blocks,
        LoopSettings(1, 0.1, warmup=0, batch_size=4),
        tmp_path,
        losses=mean_of_rows,
        prepare=lambda rows, row_ids, step: rows.reshape(pieces * len(rows), -1),
    )
    row = loop._train_step()
    assert row["loss"] == pytest.approx(3.5)
    assert row["grad_norm"] == pytest.approx(8**-0.5)  # each of eight numbers has an eighth of the tokens
