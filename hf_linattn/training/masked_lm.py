"""Masked-language modelling: blocks between the tokenizer's own special tokens, masks, and the loss on them.

masking = Masking.of(tokenizer, block_size=128, seed=0)
blocks = masking.load_blocks("books/")  # int32 [blocks, 128]
batch = masking.prepare(blocks[rows], rows, step)  # int32 [B, 2, 128]: what the model sees, targets
masked_losses(model, batch)  # [B]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hf_linattn.data import BlockFile, build_blocks, read_tokens
from hf_linattn.errors import DataError
from hf_linattn.training.divergence import NO_TARGET, target_losses
from hf_linattn.training.head import predict

SHARE = 0.15
"""Part of a block's tokens that is to be predicted."""

HIDDEN, SWAPPED = 0.8, 0.1
"""Of these, the parts that become the mask token and any ordinary token; the rest stays as it is."""


@dataclass(frozen=True)
class Masking:
    """How blocks are built and masked.

    BERT and its relatives were pretrained on rows that begin with [CLS] and end with [SEP], so every block
    gets what the tokenizer puts around a text; a document in the middle of a block ends with the separator,
    as in RoBERTa's FULL-SENTENCES (arXiv:1907.11692, section 4.2).

    Every block has the same number of targets, round(0.15 n) of its n tokens, as BERT's own data have
    (google-research/bert, create_pretraining_data.py). transformers' collator draws each token by itself:
    then the mean over rows would not be the mean over tokens, and a row may have no target at all. Masks are
    computed from seed, step and block number alone, so neither the number of processes, nor how a batch is
    divided, nor a resumed run changes them.

    Attributes:
        tokenizer: the model's.
        block_size: tokens per block, special tokens included.
        seed: of the masks in training; those of validation are always the same.
        head, tail: token ids before and after the text of every block.
        separator: token id after every document, or None.
    """

    tokenizer: PreTrainedTokenizerBase
    block_size: int
    seed: int
    head: tuple[int, ...]
    tail: tuple[int, ...]
    separator: int | None

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, block_size: int, seed: int, *, masks: bool = True
    ) -> Masking:
        """Read the special tokens from the tokenizer.

        Args:
            tokenizer: the model's.
            block_size: tokens per block, special tokens included.
            seed: of the masks in training.
            masks: False where only blocks are wanted, without masks.

        Raises:
            DataError: it has no mask token, or a block has no room beside the special tokens.
        """
        if masks and tokenizer.mask_token_id is None:
            raise DataError(
                f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__} has no mask token, and "
                "masked-language modelling hides words behind it: name the model's own tokenizer with "
                "--tokenizer, or train for the next token with --objective causal"
            )
        text = "a"
        whole, bare = (tokenizer(text, add_special_tokens=add)["input_ids"] for add in (True, False))
        start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        head, tail = tuple(whole[:start]), tuple(whole[start + len(bare) :])
        if block_size <= len(head) + len(tail):
            raise DataError(
                f"--block-size {block_size} leaves no room for text: the tokenizer adds "
                f"{len(head) + len(tail)} special tokens to every block"
            )
        separators = (tokenizer.sep_token_id, tokenizer.eos_token_id)
        return cls(
            tokenizer, block_size, seed, head, tail, next((t for t in separators if t is not None), None)
        )

    @property
    def targets(self) -> int:
        """Count the tokens to predict in every block."""
        return max(1, round(SHARE * self._room))

    @property
    def description(self) -> str:
        """Describe what is done with documents, for the record."""

        def shown(ids: tuple[int, ...]) -> str:
            return " ".join(repr(token) for token in self.tokenizer.convert_ids_to_tokens(list(ids)))

        between = f", each between {shown(self.head)} and {shown(self.tail)}" if self.head + self.tail else ""
        after = "by nothing" if self.separator is None else f"by the token {shown((self.separator,))}"
        return (
            f"each document is followed {after}; joined in order and cut into pieces of {self._room} tokens"
            f"{between}; attention crosses their borders"
        )

    @cached_property
    def _ordinary(self) -> NDArray[np.int64]:
        """What may be swapped in. A padding token would move all later positions in RoBERTa."""
        return np.setdiff1d(np.arange(len(self.tokenizer)), self.tokenizer.all_special_ids)

    @property
    def _room(self) -> int:
        return self.block_size - len(self.head) - len(self.tail)

    def load_blocks(
        self,
        source: Any,
        *,
        column: str = "text",
        split: str = "train",
        stream: bool = False,
        limit: int | None = None,
        file: BlockFile | None = None,
    ) -> NDArray[np.int32]:
        """Cut a text into blocks `[blocks, block_size]`, without those too short of ordinary tokens.

        Arguments and errors are those of `hf_linattn.data.load_blocks`.
        """
        after = () if self.separator is None else (self.separator,)
        pieces = read_tokens(source, self.tokenizer, after=after, column=column, split=split, stream=stream)
        return build_blocks(
            pieces,
            self._room,
            source=source,
            dress=self._dress,
            width=self.block_size,
            limit=limit,
            file=file,
        )

    def _dress(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        rows = rows[(~self._special(rows)).sum(1) >= self.targets]
        ends = (np.tile(np.array(ids, dtype=np.int32), (len(rows), 1)) for ids in (self.head, self.tail))
        return np.concatenate([next(ends), rows, next(ends)], axis=1)

    def prepare(self, blocks: NDArray[np.int32], row_ids: NDArray[np.int64], step: int) -> NDArray[np.int32]:
        """Mask blocks.

        Args:
            blocks: [B, N].
            row_ids: [B], which rows of the text they are.
            step: 1, 2, ... in training; 0 in validation, whose masks are the same for every seed.

        Returns:
            [B, 2, N]: what the model sees, and the targets, `NO_TARGET` where there is none.
        """
        seed = self.seed if step else 0
        rows = [self._mask(block, seed, step, int(n)) for block, n in zip(blocks, row_ids, strict=True)]
        return np.stack(rows)

    def _mask(self, block: NDArray[np.int32], seed: int, step: int, number: int) -> NDArray[np.int32]:
        # the name keeps these numbers apart from those that order the blocks and seed dropout
        rng = np.random.default_rng([*b"mlm", seed, step, number])
        places = rng.permutation(np.flatnonzero(~self._special(block)))[: self.targets]
        draws = rng.random(self.targets)
        swapped = places[(draws >= HIDDEN) & (draws < HIDDEN + SWAPPED)]
        seen, targets = block.copy(), np.full_like(block, NO_TARGET)
        targets[places] = block[places]
        seen[places[draws < HIDDEN]] = self.tokenizer.mask_token_id
        seen[swapped] = rng.choice(self._ordinary, size=len(swapped))
        return np.stack([seen, targets])

    def _special(self, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.isin(ids, self.tokenizer.all_special_ids)


def masked_losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Compute the mean negative log-likelihood of every row's targets, in nats: [B, 2, N] -> [B].

    The batch is as `Masking.prepare` gives it.
    """
    return target_losses(predict(model, batch[:, 0]), masked_tokens(batch))


def masked_tokens(batch: Tensor) -> Tensor:
    """Tell what each position is to predict: [B, 2, N] -> [B, N]."""
    return batch[:, 1]
