"""Give a sentence encoder another attention and let the original teach it back.

    python examples/distill_encoder.py --model DIR --output-dir out              # elu1, 300 steps
    python examples/distill_encoder.py --model DIR --data books/ --patch softmax1 --output-dir out2
    python examples/distill_encoder.py --model DIR --data books/ --measure out    # of hf_linattn.convert, too

Student: the patched model. Teacher: the same model, unpatched. Only sentences are needed, no labels. A
sentence's embedding is the mean of the last hidden states over its tokens, normalised: the way of the
sentence-transformers models with mean pooling. The loss is 1 - cosine of the two embeddings, plus
--hidden-weight times the relative squared error of the hidden states after every layer.

Measured on sentences of documents that are never trained on, for the patched model before and after: the
mean cosine to the original's embeddings; Spearman's rank correlation of all similarities between two
sentences with the original's; how many sentences keep their nearest neighbour.

Without --data: docstrings of the Python standard library. Stopped at any moment, the same command
continues from its last checkpoint. The output folder is a model for `hf_linattn.from_pretrained`.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase

from hf_linattn import from_pretrained, patch_model
from hf_linattn.cli.files import write_json
from hf_linattn.data import load_documents
from hf_linattn.demo.stdlib_text import stdlib_files
from hf_linattn.errors import DataError, LinattnError, TrainingError
from hf_linattn.finetune.model import switch_off_dropout
from hf_linattn.training.loop import LoopSettings, TrainingLoop

CHECKPOINT_EVERY = 50
"""Steps; what a stop can lose."""

Documents = list[str]
"""One text each."""


def docstrings(*, held_out: bool) -> Documents:
    """Return the docstrings of each standard-library module, joined; modules without any are left out."""
    texts = []
    for path in stdlib_files(held_out=held_out):
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # lib2to3 and others keep files that are broken on purpose
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        texts.append("\n\n".join(filter(None, map(ast.get_docstring, nodes))))
    return [text for text in texts if text]


def split_sentences(text: str) -> list[str]:
    """Return the sentences of 4 to 60 words that contain no code, in order."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    sentences = [s for p in paragraphs for s in re.split(r"(?<=[.!?])[\"”')]*\s+(?=[A-Z\"“'(])", p)]
    return [s for s in sentences if 4 <= len(s.split()) <= 60 and not re.search(r">>>|[{}=|]|--", s)]


def sentence_sets(data: str | None, eval_data: str | None) -> tuple[list[str], list[str]]:
    """Choose distinct sentences to train on and distinct others to measure, from different documents.

    Raises:
        DataError: one document alone cannot be divided, or there are too few sentences.
    """
    if data is None:
        train, held = docstrings(held_out=False), docstrings(held_out=True)
    else:
        train = list(load_documents(data)["text"])
        held = list(load_documents(eval_data)["text"]) if eval_data else train[9::10] or train[1:][-1:]
        if not held:
            raise DataError(f"{data} is one document: give others to measure on with --eval-data")
        train = train if eval_data else [text for text in train if text not in held]
    seen = dict.fromkeys(s for text in train for s in split_sentences(text))
    other = dict.fromkeys(s for text in held for s in split_sentences(text) if s not in seen)
    if not seen or len(other) < 3:
        raise DataError(f"{len(seen)} sentences to train on and {len(other)} to measure: give more text")
    return list(seen), list(other)


def tokenize(sentences: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> NDArray[np.int32]:
    """Tokenize: [sentences, length] token ids, padded at the right and cut."""
    encoded = tokenizer(
        sentences, padding="max_length", truncation=True, max_length=length, padding_side="right"
    )
    return np.asarray(encoded["input_ids"], dtype=np.int32)


def hidden_states(model: nn.Module, ids: Tensor, padding: int) -> tuple[list[Tensor], Tensor]:
    """Give states after every layer, each [B, N, D], and the real tokens, [B, N]; N is the longest row's."""
    mask = ids != padding
    longest = int(mask.sum(1).max())
    ids, mask = ids[:, :longest], mask[:, :longest]
    states = model(input_ids=ids, attention_mask=mask.long(), output_hidden_states=True).hidden_states
    return list(states[1:]), mask


def pool(states: Tensor, mask: Tensor) -> Tensor:
    """Embed: [B, N, D], [B, N] -> [B, D], the mean over the real tokens, of length 1."""
    weights = mask.unsqueeze(-1).to(states.dtype)
    return F.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


def distillation(teacher: nn.Module, padding: int, hidden: float) -> Callable[[nn.Module, Tensor], Tensor]:
    """Loss per sentence for `TrainingLoop`: (student, ids [B, N]) -> [B]."""

    def losses(student: nn.Module, ids: Tensor) -> Tensor:
        with torch.no_grad():
            want, mask = hidden_states(teacher, ids, padding)
        got, _ = hidden_states(student, ids, padding)
        loss = 1 - (pool(got[-1], mask) * pool(want[-1], mask)).sum(-1)
        for mine, original in zip(got, want, strict=True):
            error = ((mine - original).square().sum(-1) * mask).sum(1)
            loss = loss + hidden / len(got) * error / (original.square().sum(-1) * mask).sum(1)
        return loss

    return losses


@torch.no_grad()
def embed(model: nn.Module, rows: NDArray[np.int32], padding: int) -> Tensor:
    """Embed sentences: [sentences, D] on the CPU."""
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    batches = [torch.from_numpy(rows[i : i + 64]).long().to(device) for i in range(0, len(rows), 64)]
    embeddings = []
    for ids in batches:
        states, mask = hidden_states(model, ids, padding)
        embeddings.append(pool(states[-1], mask).float().cpu())
    model.train(was_training)
    return torch.cat(embeddings)


@dataclass(frozen=True)
class Agreement:
    """How far embeddings agree with the original's; all are 1 when they are the same.

    Attributes:
        cosine: mean cosine between a sentence's two embeddings.
        cosine_p05: the cosine that 95 % of the sentences exceed.
        spearman: rank correlation of the similarities of all pairs of sentences.
        neighbour: part of the sentences whose nearest neighbour is the same.
    """

    cosine: float
    cosine_p05: float
    spearman: float
    neighbour: float


def agreement(got: Tensor, want: Tensor) -> Agreement:
    """Compare embeddings, [S, D] each."""
    got, want = (F.normalize(embeddings.double(), dim=-1) for embeddings in (got, want))
    cosines = (got * want).sum(-1)
    here, there = got @ got.T, want @ want.T
    upper = torch.triu_indices(len(got), len(got), offset=1)
    # distinct sentences: ties among float64 similarities are too rare to need mean ranks
    ranks = torch.stack([m[upper[0], upper[1]].argsort().argsort().double() for m in (here, there)])
    nearest = [m.fill_diagonal_(-2).argmax(1) for m in (here, there)]
    return Agreement(
        float(cosines.mean()),
        float(cosines.quantile(0.05)),
        float(torch.corrcoef(ranks)[0, 1]),
        float((nearest[0] == nearest[1]).double().mean()),
    )


@dataclass(frozen=True)
class Sentences:
    """Rows of token ids `[sentences, length]` to learn from and others to measure, filled up by `padding`."""

    train: NDArray[np.int32]
    held: NDArray[np.int32]
    padding: int


def read_sentences(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Sentences:
    """Tokenize the sentences of the text.

    Raises:
        DataError: too few, or the tokenizer cannot pad.
    """
    if tokenizer.pad_token_id is None:
        raise DataError(f"the tokenizer of {args.model} has no padding token")
    train, held = sentence_sets(args.data, args.eval_data)
    rng = np.random.default_rng(args.seed)
    held = [held[i] for i in rng.permutation(len(held))[: args.held_out]]
    rows = (tokenize(sentences, tokenizer, args.max_length) for sentences in (train, held))
    return Sentences(*rows, tokenizer.pad_token_id)


def measure(args: argparse.Namespace) -> Agreement:
    """Measure how far an existing model agrees with the original."""
    sentences = read_sentences(args, AutoTokenizer.from_pretrained(args.model))
    original, other = (
        from_pretrained(name, dtype=torch.float32).eval() for name in (args.model, args.measure)
    )
    got, want = (embed(model, sentences.held, sentences.padding) for model in (other, original))
    return agreement(got, want)


def run(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure, distil, measure again; returns what results.json holds."""
    folder = Path(args.output_dir)
    settings = {key: value for key, value in vars(args).items() if key not in ("output_dir", "measure")}
    began = folder / "run.json"
    if began.exists() and json.loads(began.read_text(encoding="utf-8")) != settings:
        raise TrainingError(f"{folder} holds a run with other arguments: choose another --output-dir")
    if (folder / "results.json").exists():
        done: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        return done
    accelerator = Accelerator(cpu=args.cpu)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    sentences = read_sentences(args, tokenizer)
    rows, held_rows, padding = sentences.train, sentences.held, sentences.padding

    teacher = AutoModel.from_pretrained(args.model, dtype=torch.float32).to(accelerator.device).eval()
    student = from_pretrained(args.model, auto_class=AutoModel, dtype=torch.float32).to(accelerator.device)
    want = embed(teacher, held_rows, padding)
    measured = {"unpatched": asdict(agreement(embed(student, held_rows, padding), want))}
    torch.manual_seed(args.seed)
    patch_model(student, args.patch)
    switch_off_dropout(student)  # linear attention has no weights to drop, and the targets are exact
    measured["patched"] = asdict(agreement(embed(student, held_rows, padding), want))
    write(f"before training: {show(measured['patched'])}")

    folder.mkdir(parents=True, exist_ok=True)
    write_json(began, settings)
    loop = TrainingLoop(
        accelerator,
        student,
        rows,
        LoopSettings(
            args.steps,
            args.lr,
            warmup=args.steps // 10,
            batch_size=args.batch_size,
            seed=args.seed,
            eval_every=CHECKPOINT_EVERY,
            checkpoint_every=CHECKPOINT_EVERY,
        ),
        folder,
        eval_blocks=held_rows[:64],
        losses=distillation(teacher, padding, args.hidden_weight),
    )
    loop.run()
    measured["distilled"] = asdict(agreement(embed(student, held_rows, padding), want))
    student.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    results = {
        "command": command,
        "arguments": vars(args),
        "sentences": {"train": len(rows), "seen": args.steps * args.batch_size, "measured": len(held_rows)},
        "parameters": sum(parameter.numel() for parameter in student.parameters()),
        "measured": measured,
        "seconds": round(loop.seconds, 1),
        "device": str(accelerator.device),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "date": time.strftime("%Y-%m-%d"),
    }
    write_json(folder / "results.json", results)
    loop.checkpoint.remove()
    return results


def show(numbers: dict[str, float]) -> str:
    """Format the figures as one line."""
    return "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())


def write(text: str) -> None:
    """Print to stderr, where the progress bar is."""
    sys.stderr.write(text + "\n")


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 1 failed, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or hub name of an encoder that pools by the mean")
    todo = parser.add_mutually_exclusive_group(required=True)
    todo.add_argument("--output-dir", help="where everything is written")
    todo.add_argument("--measure", metavar="FOLDER", help="train nothing, measure the model of this folder")
    add("--patch", default="elu1", help="attention to install (default: %(default)s)")
    add("--data", help="text to train on, as for hf_linattn.finetune (default: docstrings, see above)")
    add("--eval-data", help="text to measure on (default: every tenth document of --data, else its last)")
    add("--steps", type=int, default=300, help="updates of the weights (default: %(default)s)")
    add("--batch-size", type=int, default=16, help="sentences per step (default: %(default)s)")
    add("--max-length", type=int, default=48, help="tokens kept of a sentence (default: %(default)s)")
    add("--lr", type=float, default=3e-4, help="peak learning rate (default: %(default)s)")
    add("--hidden-weight", type=float, default=1.0, help="see above (default: %(default)s)")
    add("--held-out", type=int, default=512, help="sentences to measure at most (default: %(default)s)")
    add("--seed", type=int, default=0, help="order of the data, choice of sentences (default: %(default)s)")
    add("--cpu", action="store_true", help="use the CPU even where there is a GPU")
    args = parser.parse_args(argv)
    try:
        if args.measure:
            print(f"{args.measure}  {show(asdict(measure(args)))}")
            return 0
        results = run(args, shlex.join(["python", "examples/distill_encoder.py", *argv]))
    except LinattnError as error:
        write(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        write("\ninterrupted; the same command continues from the last checkpoint")
        return 130
    for name, numbers in results["measured"].items():
        print(f"{name:10} {show(numbers)}")
    print(f"{results['seconds']:.0f} s of training; model and results.json are in {args_folder(results)}")
    return 0


def args_folder(results: dict[str, Any]) -> str:
    """Where the run was written to."""
    return str(results["arguments"]["output_dir"])


if __name__ == "__main__":
    raise SystemExit(main())
