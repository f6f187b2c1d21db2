"""The training loop: cosine schedule with warm-up, validation, checkpoints; one or many processes.

What step k does depends only on the settings and k: the rows of its batch, its learning rate and its random
numbers are computed from them, never carried along. So a run that is killed and resumed repeats the
uninterrupted one exactly, and the same global batch gives the same update however many processes share it.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator, DistributedType
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from hf_linattn.errors import TrainingError
from hf_linattn.parallel import Shard, row_part
from hf_linattn.training.checkpoint import Checkpoint, TrainLog
from hf_linattn.training.divergence import NO_TARGET, cross_entropy
from hf_linattn.training.early_stopping import EarlyStop
from hf_linattn.training.fsdp import MetaCopy, full_tensor, is_sharding, reshard, shard
from hf_linattn.training.head import predict, token_losses
from hf_linattn.training.optimizers import OptimizerName, build_optimizer

LossFunction = Callable[[nn.Module, Tensor], Tensor]
"""(model, token ids [B, N] or a prepared batch [B, ...]) -> mean loss of every row [B]."""

Preparation = Callable[[NDArray[np.int32], NDArray[np.int64], int], NDArray[np.int32]]
"""(blocks [B, N], their row ids [B], the step; 0 in validation) -> batch of the loss function, [B, ...]."""

TargetCount = Callable[[NDArray[np.int32]], NDArray[np.int64]]
"""Blocks [B, N] -> how many tokens of each are learned [B]."""

LOST_SECONDS = 600.0
"""A checkpoint is late, and comes at once, when the one before is so long ago: a kill loses no more."""
CHECKPOINT_SHARE = 20
"""Nor does one come before so many times what the last one took."""
MAX_SKIPPED = 20
"""float16 halves its loss scale when gradients overflow; so many steps in a row have another cause."""


@dataclass(frozen=True)
class LoopSettings:
    """Settings of the loop; the names are those of the command's options.

    `min_lr_rate` is the learning rate of the last step as a part of the peak. `patience` validations without
    a lower loss end the run before `max_steps`, and the weights of the best one are kept; 0 never does, and
    keeps the last. Where steps are slow, checkpoints come more often than `checkpoint_every`, see
    `LOST_SECONDS`.
    """

    max_steps: int
    lr: float
    warmup: int
    batch_size: int
    min_lr_rate: float = 0.1
    grad_accum: int = 1
    optimizer: OptimizerName = "adamw"
    weight_decay: float = 0.0
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    seed: int = 0
    eval_every: int = 100
    checkpoint_every: int = 100
    patience: int = 0


def learning_rate(step: int, settings: LoopSettings) -> float:
    """Compute the rate of step 1, ..., max_steps: linear for `warmup` steps to `lr`, then a cosine down."""
    if step <= settings.warmup:
        return settings.lr * step / settings.warmup
    done = (step - settings.warmup) / max(1, settings.max_steps - settings.warmup)
    least = settings.min_lr_rate
    return settings.lr * (least + (1 - least) * (1 + math.cos(math.pi * done)) / 2)


def batch_rows(step: int, size: int, blocks: int, seed: int) -> NDArray[np.int64]:
    """Choose the rows of the global batch of step 1, 2, ...: a new permutation of all blocks per epoch.

    A batch may take the end of one epoch and the start of the next.

    Args:
        step: the first is 1.
        size: rows in the batch.
        blocks: rows of the text.
        seed: of the permutations.

    Returns:
        Row ids, `[size]`, each below `blocks`.
    """
    positions = np.arange((step - 1) * size, step * size)
    epochs = positions // blocks
    row_ids = np.empty(size, dtype=np.int64)
    for epoch in np.unique(epochs):
        order = np.random.default_rng([seed, int(epoch)]).permutation(blocks)
        in_epoch = epochs == epoch
        row_ids[in_epoch] = order[positions[in_epoch] % blocks]
    return row_ids


def next_token_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Compute the mean negative log-likelihood of tokens 2..N of every row, in nats: [B, N] -> [B]."""
    predictions = predict(model, ids, use_cache=False)
    return token_losses(cross_entropy, predictions[:, :-1], ids[:, 1:]).mean(1)


def next_tokens(ids: Tensor) -> Tensor:
    """Tell what each position is to predict, `NO_TARGET` for the last: [B, N] -> [B, N]."""
    return F.pad(ids[:, 1:], (0, 1), value=NO_TARGET)


def split_token_losses(split: Shard, model: nn.Module, ids: Tensor) -> Tensor:
    """Compute what this process adds to `next_token_losses` of rows split over processes: [B, N] -> [B].

    The mean over the processes is that of the whole rows.

    Args:
        split: the part that it reads.
        model: inside `split_rows`.
        ids: whole rows.
    """
    part = row_part(ids, split)
    predictions = predict(model, part.ids, position_ids=part.position_ids, use_cache=False)
    losses = token_losses(cross_entropy, predictions[:, : part.targets.shape[1]], part.targets)
    return losses.sum(1) * (split.size / (ids.shape[1] - 1))


def row_weights(blocks: NDArray[np.int32], count_targets: TargetCount | None) -> NDArray[np.float64]:
    """Weigh rows so that the mean of their mean losses is that over their targets: [B, N] -> [B], mean 1."""
    counts = np.ones(len(blocks)) if count_targets is None else count_targets(blocks)
    weights: NDArray[np.float64] = counts / counts.mean()
    return weights


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    blocks: NDArray[np.int32],
    batch_size: int,
    losses: LossFunction = next_token_losses,
    prepare: Preparation | None = None,
    count_targets: TargetCount | None = None,
    sharing: int = 1,
) -> float:
    """Compute the mean loss over all blocks, in nats per token, shared between the processes.

    Every process runs the same number of full batches (the last ones repeat rows, with weight 0), because a
    process without work would leave the others waiting.

    Args:
        accelerator: of this process.
        model: on its device.
        blocks: rows of token ids, `[blocks, N]`.
        batch_size: rows per process and forward pass.
        losses: of the rows of a batch.
        prepare: makes the batch of rows; None takes them as they are.
        count_targets: tells how many tokens a row's loss is the mean of; None where all have as many.
        sharing: neighbouring processes that read parts of the same rows.
    """
    was_training = model.training
    model.eval()
    weights = row_weights(blocks, count_targets).tolist()
    total = 0.0
    stride = batch_size * (accelerator.num_processes // sharing)
    first = accelerator.process_index // sharing * batch_size
    for start in range(first, -(-len(blocks) // stride) * stride, stride):
        row_ids = np.arange(start, start + batch_size) % len(blocks)
        batch = blocks[row_ids] if prepare is None else prepare(blocks[row_ids], row_ids, 0)
        values = losses(model, to_device(batch, accelerator))
        total += math.fsum(map(operator.mul, values.tolist(), weights[start:]))  # none behind the last row
    model.train(was_training)
    return math.fsum(gather_object([total])) / sharing / len(blocks)


class TrainingLoop:
    """Train the parameters of a model that require gradients.

        loop = TrainingLoop(Accelerator(), model, blocks, settings, Path("out"))
        loop.run()  # continues from the checkpoint in out/ where there is one

    Writes `train.csv` and `checkpoint/` in `output_dir`, on the main process only.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        blocks: NDArray[np.int32],
        settings: LoopSettings,
        output_dir: Path,
        *,
        eval_blocks: NDArray[np.int32] | None = None,
        losses: LossFunction = next_token_losses,
        prepare: Preparation | None = None,
        count_targets: TargetCount | None = None,
        rate: Callable[[str], float] = lambda name: 1.0,
        split: Shard | None = None,
    ) -> None:
        """Build the optimiser, and read the checkpoint where there is one.

        Args:
            accelerator: of this process.
            model: on any device.
            blocks: rows of token ids, `[blocks, N]`.
            settings: the options.
            output_dir: an existing folder.
            eval_blocks: rows of the validation, likewise.
            losses: of the rows of a batch.
            prepare: makes the batch of rows; None takes them as they are.
            count_targets: tells how many tokens a row's loss is the mean of; None where all have as many.
            rate: factor of the learning rate by the name of the parameter.
            split: the part of each row that this process reads; None for whole rows.

        Raises:
            TrainingError: a way to share the work that is not supported, or a damaged checkpoint.
        """
        _check_distribution(accelerator)
        self.accelerator, self.settings, self.blocks = accelerator, settings, blocks
        self.eval_blocks, self.losses, self.prepare = eval_blocks, losses, prepare
        self.count_targets = count_targets
        self.split, self.sharing = split, 1 if split is None else split.size
        self.replicas = accelerator.num_processes // self.sharing
        self.global_batch = settings.batch_size * settings.grad_accum * self.replicas
        self.sent_in_step = 0
        """Bytes that this process sent to those that share its rows, in its last step."""
        sharded = is_sharding(accelerator)
        if not sharded:  # otherwise each part goes there by itself
            model.to(accelerator.device)
        self.bare_model = model
        optimizer = build_optimizer(
            settings.optimizer, model, rate, settings.lr, settings.weight_decay, settings.adam_beta2
        )
        main = accelerator.is_main_process
        self._meta_copy = MetaCopy(model, main) if sharded else None
        self.model: Any
        prepare_both = partial(shard, accelerator) if sharded else accelerator.prepare
        self.model, self.optimizer = prepare_both(model, optimizer)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.checkpoint = Checkpoint(output_dir)
        progress = self.checkpoint.load(model, self.optimizer.optimizer) or {"step": 0, "seconds": 0.0}
        validations = progress.get("validations", [])
        self.early_stop = EarlyStop(model, output_dir, settings.patience, validations, write=main)
        self.kept: tuple[int, float | None]
        """Set by `run`: the step of the weights that are kept, and their validation loss."""
        self.step: int = progress["step"]
        """Steps done."""
        self._saved_step: int | None = self.step or None
        self._saved_at, self._save_seconds, self._late = time.perf_counter(), 0.0, False
        self._seconds_before: float = progress["seconds"]
        self._started = time.perf_counter()
        if accelerator.scaler is not None and "scaler" in progress:
            accelerator.scaler.load_state_dict(progress["scaler"])
        self._skipped = 0
        # nobody may still be reading the checkpoint when it is replaced
        accelerator.wait_for_everyone()
        self.log = TrainLog(output_dir / "train.csv", self.step) if main else None

    def run(self) -> None:
        """Train up to `max_steps`.

        Raises:
            TrainingError: loss or gradient is not a number, or a file cannot be written.
        """
        settings, main = self.settings, self.accelerator.is_main_process
        if self.step == 0 and self.eval_blocks is not None:
            self._write_row(eval_loss=self._evaluate())
        self.model.train()
        with tqdm(
            total=settings.max_steps,
            initial=self.step,
            desc="train",
            unit="step",
            disable=not main,
            mininterval=0.5,
        ) as bar:
            while self.step < settings.max_steps and not self.early_stop.reached():
                row = self._train_step()
                due = self.step % settings.eval_every == 0 or self.step == settings.max_steps
                eval_loss = self._evaluate() if due and self.eval_blocks is not None else None
                self._write_row(**row, eval_loss=eval_loss)
                bar.set_postfix(
                    {"loss": f"{row['loss']:.4f}", "tokens/s": f"{row['tokens_per_second']:.0f}"},
                    refresh=False,
                )
                bar.update()
        if self._meta_copy is not None:
            reshard(self.bare_model)
        self.kept = self.early_stop.restore(self.step)
        for name, parameter in self.bare_model.named_parameters():
            if parameter.requires_grad and not torch.isfinite(full_tensor(parameter)).all():
                raise self._failure(f"the last step, {self.step}, left numbers in {name} that are not finite")

    def trained_model(self) -> nn.Module | None:
        """Give the model without what distributes it; where it was sharded, on the main process alone."""
        if self._meta_copy is None:
            bare: nn.Module = self.accelerator.unwrap_model(self.model)
            return bare
        return self._meta_copy.fill(self.bare_model)

    @property
    def seconds(self) -> float:
        """Measure the wall time of the run, over all its resumed parts, without what a kill threw away."""
        return self._seconds_before + time.perf_counter() - self._started

    def _train_step(self) -> dict[str, float]:
        """One update of the parameters; returns the numbers of its row in `train.csv`."""
        began = time.perf_counter()
        step, settings, accelerator = self.step + 1, self.settings, self.accelerator
        # every process needs dropout of its own
        randomness = np.random.SeedSequence([settings.seed, step, accelerator.process_index])
        torch.manual_seed(int(randomness.generate_state(1)[0]))
        rate = learning_rate(step, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        row_ids = batch_rows(step, self.global_batch, len(self.blocks), settings.seed)
        sent = 0 if self.split is None else self.split.sent
        loss = self._backward(row_ids, step)
        self.sent_in_step = 0 if self.split is None else self.split.sent - sent
        if not math.isfinite(loss):
            raise self._failure(f"the loss is {loss} at step {step}")
        norm = accelerator.clip_grad_norm_(self.parameters, settings.max_grad_norm or math.inf)
        norm = float(full_tensor(norm))
        if not math.isfinite(norm) and accelerator.scaler is None:
            raise self._failure(f"the gradient's norm is {norm} at step {step}")
        # Only now: the loss of this step has shown that the state after the one before is sound.
        checkpoint_seconds = self._save_checkpoint_when_due()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._skipped = self._skipped + 1 if self.optimizer.step_was_skipped else 0
        if self._skipped > MAX_SKIPPED:
            raise self._failure(f"the float16 gradients overflow again and again, last at step {step}")
        self.step = step
        tokens = self.global_batch * self.blocks.shape[1]
        speed = tokens / (time.perf_counter() - began - checkpoint_seconds)
        return {"loss": loss, "lr": rate, "grad_norm": norm, "tokens_per_second": round(speed, 1)}

    def _backward(self, row_ids: NDArray[np.int64], step: int) -> float:
        """Add the gradient of the global batch's mean loss; returns that loss."""
        accelerator, settings = self.accelerator, self.settings
        shares = row_ids.reshape(settings.grad_accum, self.replicas, settings.batch_size)
        replica = accelerator.process_index // self.sharing
        local_row_ids = shares[:, replica]
        local_weights = None  # all rows count the same, cut by a preparation or not
        if self.count_targets is not None:
            weights = row_weights(self.blocks[row_ids], self.count_targets).reshape(shares.shape)
            local_weights = torch.from_numpy(weights[:, replica]).float().to(accelerator.device)
        # the loss, and whether a checkpoint is late: all processes then know both
        totals = torch.zeros(2, device=accelerator.device)
        since = time.perf_counter() - self._saved_at
        totals[1] = since > max(LOST_SECONDS, CHECKPOINT_SHARE * self._save_seconds)
        for micro in range(settings.grad_accum):
            last = micro == settings.grad_accum - 1
            rows = self.blocks[local_row_ids[micro]]
            if self.prepare is not None:
                rows = self.prepare(rows, local_row_ids[micro], step)
            batch = to_device(rows, accelerator)
            with nullcontext() if last else accelerator.no_sync(self.model):
                losses = self.losses(self.model, batch)
                if local_weights is not None:
                    losses = losses * local_weights[micro]
                loss = losses.mean() / settings.grad_accum
                accelerator.backward(loss)
            totals[0] += loss.detach()
        mean, late = accelerator.reduce(totals, "mean").tolist()
        self._late = late > 0
        return float(mean)

    def _evaluate(self) -> float:
        assert self.eval_blocks is not None
        loss = evaluate(
            self.accelerator,
            self.model,
            self.eval_blocks,
            self.settings.batch_size,
            self.losses,
            self.prepare,
            self.count_targets,
            self.sharing,
        )
        if not math.isfinite(loss):
            raise self._failure(f"the validation loss is {loss} after step {self.step}")
        self.early_stop.note(loss, self.step, sharded=self._meta_copy is not None)
        return loss

    def _write_row(self, **values: float | None) -> None:
        if self.log is not None:
            values["tokens"] = self.step * self.global_batch * self.blocks.shape[1]
            self.log.append(step=self.step, **values)
            known = {name: value for name, value in values.items() if value is not None}
            self.accelerator.log(known, step=self.step)

    def _save_checkpoint_when_due(self) -> float:
        """Replace the checkpoint every so many steps, or when it is late; returns the seconds that took."""
        began = time.perf_counter()
        due = self.step % self.settings.checkpoint_every == 0 or self._late
        if self.step and due and self.step != self._saved_step:
            self._save_checkpoint()
            self._saved_at = time.perf_counter()
            self._save_seconds = self._saved_at - began
        return time.perf_counter() - began

    def _save_checkpoint(self) -> None:
        progress = {"step": self.step, "seconds": self.seconds, "validations": self.early_stop.losses}
        if self.log is not None:
            self.log.sync()
        if self.accelerator.scaler is not None:
            progress["scaler"] = self.accelerator.scaler.state_dict()
        main = self.accelerator.is_main_process
        self.checkpoint.save(self.bare_model, self.optimizer.optimizer, progress, write=main)
        self._saved_step = self.step

    def _failure(self, what: str) -> TrainingError:
        kept = (
            f"the checkpoint of step {self._saved_step} is kept"
            if self._saved_step
            else "no checkpoint was due yet"
        )
        advice = "Try a lower learning rate, a longer warm-up or --mixed-precision no."
        if self.step == 0:  # no update has been made that another rate could mend
            advice = (
                "The model began so: its weights hold NaN or Inf, or a sum overflows (in 16 bits, try "
                "--mixed-precision no)."
            )
        return TrainingError(f"{what}; {kept}. {advice}")


_SUPPORTED = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_NPU,
}


def _check_distribution(accelerator: Accelerator) -> None:
    if accelerator.distributed_type not in _SUPPORTED and not is_sharding(accelerator):
        raise TrainingError(
            f"{accelerator.distributed_type.value} is not supported: use plain data parallelism "
            "(accelerate launch --multi_gpu, or --cpu) or FSDP (--use_fsdp --fsdp_version 2)"
        )


def to_device(rows: NDArray[np.int32], accelerator: Accelerator) -> Tensor:
    """Put a batch on the device of this process, as integers that models take."""
    return torch.from_numpy(rows).to(accelerator.device, dtype=torch.int64)
