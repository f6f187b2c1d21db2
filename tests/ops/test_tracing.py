"""Whether a program is exported; torch before 2.12 says so of compiled ones too."""

import torch

from hf_linattn.ops.tracing import exporting


class Told(torch.nn.Module):
    def forward(self, x):
        return x + 1 if exporting() else x - 1


def test_exported_programs_are_told_apart_from_compiled_ones():
    x = torch.zeros(2)
    torch._dynamo.reset()
    assert torch.compile(Told(), backend="eager", fullgraph=True)(x).tolist() == [-1, -1]
    torch._dynamo.reset()
    assert torch.export.export(Told(), (x,)).module()(x).tolist() == [1, 1]
    assert Told()(x).tolist() == [-1, -1]
