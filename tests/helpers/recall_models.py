"""Models whose recall is known: one that copies what followed before, one that answers at random."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class Known(PreTrainedModel):
    """Logits from `predict`; the embedding is there because causal models have one."""

    config_class = PreTrainedConfig

    def __init__(self, vocab_size):
        super().__init__(PreTrainedConfig(vocab_size=vocab_size))
        self.embedding = nn.Embedding(vocab_size, 4)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, use_cache=False):
        nothing = 0 * self.embedding(input_ids).sum(-1, keepdim=True)
        return CausalLMOutput(logits=nothing + self.predict(input_ids))


class Copier(Known):
    """After the longest end of the text that was there before comes what came then; the later of equals."""

    def predict(self, ids):
        logits = torch.zeros(*ids.shape, self.config.vocab_size)
        for row, text in enumerate(ids.tolist()):
            alike = [0] * len(text)  # tokens that end alike at j and at t
            for t, token in enumerate(text):
                alike = [(alike[j - 1] if j else 0) + 1 if text[j] == token else 0 for j in range(len(text))]
                best = max(range(t), key=lambda j, alike=alike: (alike[j], j), default=0)
                if alike[best] and best < t:
                    logits[row, t, text[best + 1]] = 50.0
        return logits


class Guesser(Known):
    """Any token with equal probability; of `allowed` alone, if given."""

    def __init__(self, vocab_size, allowed=None):
        super().__init__(vocab_size)
        self.allowed = allowed
        self.generator = torch.Generator().manual_seed(0)

    def predict(self, ids):
        logits = torch.rand(*ids.shape, self.config.vocab_size, generator=self.generator)
        if self.allowed is not None:
            logits[..., self.allowed] += 10
        return logits
