"""Models, and commands, in groups of processes on this machine: libraries load once, then processes fork.

    python tests/helpers/parallel_jobs.py jobs.json

jobs.json is a list of objects: `world`, the number of processes; `call`, the name of a function of this file;
`arguments`, its keywords. A function runs in every process, in a group of its own, and what it returns is
written to `<job number>.<rank>.json`, with the exit status: `{"exit": 0, "result": ...}`.
"""

import contextlib
import copy
import gc
import io
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_linattn import from_pretrained, patch_model, registry, unpatch_model
from hf_linattn.errors import LinattnError
from hf_linattn.eval.perplexity import __main__ as perplexity
from hf_linattn.eval.perplexity import run as perplexity_run
from hf_linattn.finetune import __main__ as finetune
from hf_linattn.finetune import run as finetune_run
from hf_linattn.parallel import Shard, row_part
from hf_linattn.patching.interface import NAME
from hf_linattn.patching.splitting import split_rows
from hf_linattn.training import loop

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import family_models, tiny_models

COMMANDS = {"finetune": finetune, "perplexity": perplexity}
WAIT = timedelta(seconds=30)


def tiny(family, patch, options, dtype, sliding="keep"):
    """A patched model, the same in all processes, its learned parameters away from where they begin."""
    dtype = getattr(torch, dtype)
    if family == "llama":
        model = tiny_models.llama(2, dtype=dtype)
    elif family == "alternating":
        kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
        model = tiny_models.build("Olmo3ForCausalLM", num_hidden_layers=2, **tiny_models.SIZES, **kinds)
    else:
        model = family_models.causal_model(family).to(dtype)
    patch_model(model, patch, options=options, sliding=sliding)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".linattn." in name and parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def mean_loss(logits, targets, count):
    logits = logits[:, : targets.shape[1]].flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum") / count


def compare(patch, options=None, family="llama", length=48, dtype="float64", recompute=False, sliding="keep"):
    """How far loss, logits and gradients of split rows are from those of whole rows; and what was sent."""
    model = tiny(family, patch, options, dtype, sliding)
    ids = tiny_models.tokens(2, length)
    count = len(ids) * (length - 1)
    with Kept(model) as all_kept:
        whole = model(ids, use_cache=False).logits
        loss = mean_loss(whole, ids[:, 1:], count)
    loss.backward()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    if recompute:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shard = Shard.of(timeout=WAIT)
    with split_rows(model, shard):
        probe, part = shard.sent, row_part(ids, shard)
        with Kept(model) as kept:
            logits = model(part.ids, position_ids=part.position_ids, use_cache=False).logits
            mine = mean_loss(logits, part.targets, count)
        forward = shard.sent
        mine.backward()
    here = slice(part.start, part.start + part.ids.shape[1])
    total = mine.detach().clone()
    dist.all_reduce(total)
    worst = 0.0
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        if gradient is None:
            assert parameter.grad is None or not parameter.grad.any()
            continue
        got = torch.zeros_like(gradient) if parameter.grad is None else parameter.grad
        dist.all_reduce(got)
        worst = max(worst, relative(got, gradient))
    return {
        "loss": relative(total, loss),
        "logits": relative(logits, whole[:, here]),
        "gradients": worst,
        "sent": [forward - probe, shard.sent - forward],
        "kept": kept.bytes / all_kept.bytes,
    }


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that forwards keep for their backwards, each memory once, without parameters."""

    def __init__(self, model):
        self.sizes = {}
        self.own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        super().__init__(self.keep, lambda tensor: tensor)

    def keep(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __enter__(self):
        super().__enter__()
        return self

    @property
    def bytes(self):
        return sum(self.sizes.values())


def relative(got, expected):
    return float(((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).detach())


def refused(patch, options=None, family="llama", length=48, sliding="keep"):
    """The error of a model whose rows cannot be split, which is left as it was."""
    model = tiny(family, patch, options, "float64", sliding)
    ids = tiny_models.tokens(1, length)
    before = model(ids, use_cache=False).logits
    try:
        shard = Shard.of(timeout=WAIT)
        with split_rows(model, shard):
            part = row_part(ids, shard)
            model(part.ids, position_ids=part.position_ids, use_cache=False)
    except LinattnError as error:
        return [type(error).__name__, str(error), torch.equal(model(ids, use_cache=False).logits, before)]
    return None


def census(patch):
    """What becomes of the tiny model of every causal type: the same, refused, not patched, or wrong."""
    shard, verdicts = Shard.of(timeout=WAIT), {}
    for name in sorted(family_models.CAUSAL_LM):
        try:
            model = family_models.causal_model(name)
            patch_model(model, patch, sliding="global")
            ids = tiny_models.tokens(1, 64)
            with torch.no_grad():
                whole = model(input_ids=ids, use_cache=False).logits
        except Exception as error:  # musicgen's tokens have other shapes
            verdicts[name] = f"not patched: {error}"
            continue
        try:
            with torch.no_grad(), split_rows(model, shard):
                part = row_part(ids, shard)
                got = model(input_ids=part.ids, position_ids=part.position_ids, use_cache=False).logits
            right = relative(got, whole[:, part.start : part.start + part.ids.shape[1]]) < 1e-5
            verdicts[name] = "same" if right else "wrong"
        except LinattnError as error:
            verdicts[name] = f"refused: {error}"
    return verdicts


def call_refused(**inputs):
    """The error of a call that a part of a row cannot be."""
    model = tiny("llama", "elu1", None, "float64")
    ids = tiny_models.tokens(1, 16)
    with split_rows(model, Shard.of(timeout=WAIT)):
        if "attention_mask" in inputs:
            inputs["attention_mask"] = torch.tensor(inputs["attention_mask"])
        try:
            model(ids, **inputs)
        except LinattnError as error:
            return [type(error).__name__, str(error)]
    return None


def heads(name, patch, family):
    """How far a model whose heads two processes share is from the model in one process."""
    one, ids = tiny(family, patch, None, "float64"), tiny_models.tokens(2, 40)
    if dist.get_rank() == 0:
        one.save_pretrained(f"{name}-patched")
        unpatch_model(copy.deepcopy(one)).save_pretrained(f"{name}-plain")
    dist.barrier()
    split = {"distributed_config": DistributedConfig(tp_size=dist.get_world_size())}
    model = AutoModelForCausalLM.from_pretrained(f"{name}-plain", **split)
    before, keys = logits_of(model, ids), set(model.state_dict())
    torch.manual_seed(dist.get_rank())  # as scripts do that want another dropout in each
    patch_model(model, patch)
    first = [None] * dist.get_world_size()
    dist.all_gather_object(first, [float(p.sum()) for key, p in model.state_dict().items() if NAME in key])
    learned = {key: p for key, p in one.state_dict().items() if NAME in key}
    model.load_state_dict(learned, strict=False)
    expected = one(ids, labels=ids, use_cache=False)
    found = {"logits": relative(logits_of(model, ids), expected.logits), "start": first[0] == first[1]}
    unpatch_model(model)
    found["unpatched"] = torch.equal(logits_of(model, ids), before) and set(model.state_dict()) == keys
    model = from_pretrained(f"{name}-patched", **split)
    got = model(ids, labels=ids, use_cache=False)
    got.loss.backward()
    expected.loss.backward()
    found["loss"] = relative(got.loss, expected.loss)
    found["gradients"] = max(
        relative(p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad, other.grad)
        for p, other in zip(model.parameters(), one.parameters(), strict=True)
        if other.grad is not None
    )
    ids, mask = tiny_models.left_padded(ids[:, :17], 5)
    how = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found["generated"] = torch.equal(model.generate(ids, **how), one.generate(ids, **how))
    model.save_pretrained(f"{name}-saved")
    dist.barrier()
    saved = from_pretrained(f"{name}-saved").state_dict()
    found["saved"] = all(torch.equal(saved.pop(key), p) for key, p in one.state_dict().items()) and not saved
    return found


@torch.no_grad()
def logits_of(model, ids):
    return model(ids, use_cache=False).logits


def alone(how, patch="elu1", options=None):
    """What the others say when process 1 ends, or sleeps, in the middle of a forward or a backward."""
    model = tiny("llama", patch, options, "float64")
    ids = tiny_models.tokens(1, 32)
    shard = Shard.of(timeout=timedelta(seconds=3))
    with split_rows(model, shard):
        part = row_part(ids, shard)
        if shard.rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if shard.rank == 1 and how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            out = model(part.ids, position_ids=part.position_ids, use_cache=False).logits
            if shard.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            out.square().mean().backward()
        except LinattnError as error:
            return [type(error).__name__, str(error)]
    return None


def command(name, argv, kill=None, cwd=None):
    """Exit status of a command, and its stdout; SIGKILL in process 1 before the step `kill`."""
    os.environ.update(ACCELERATE_USE_CPU="true", LOCAL_RANK=os.environ["RANK"])
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    finetune_run.save_loss_curve = lambda rows, path, *rest: path.write_bytes(b"")
    perplexity_run.save_plot = lambda path, *rest, **more: path.write_bytes(b"")
    before = loop.TrainingLoop._train_step

    def step(self):
        if kill and os.environ["RANK"] == "1" and self.step + 1 == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return before(self)

    loop.TrainingLoop._train_step = step
    text, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(errors):
        try:
            code = COMMANDS[name].main(argv)
        except SystemExit as end:
            code = end.code
    return {"status": code, "stdout": text.getvalue(), "stderr": errors.getvalue()}


def run(number, rank, job):
    own = Path(f"{number}.{rank}.json")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job["world"]), MASTER_ADDR="localhost")
    os.environ.update(MASTER_PORT=job["port"], GLOO_SOCKET_IFNAME="lo", TORCHELASTIC_USE_AGENT_STORE="False")
    if job["call"] != "command":
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = [globals()[job["call"]](**arguments) for arguments in job["arguments"]]
    own.write_text(json.dumps(results))


def wait(children, seconds):
    """Exit statuses; a child that does not end is killed, and "hangs"."""
    ends, deadline = {}, time.monotonic() + seconds
    while len(ends) < len(children) and time.monotonic() < deadline:
        for child in children:
            if child not in ends:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    ends[child] = os.waitstatus_to_exitcode(status)
        stopped = [child for child in children if child not in ends and "T (stopped)" in state(child)]
        if stopped and len(ends) + len(stopped) == len(children):
            break
        time.sleep(0.02)
    for child in children:
        if child not in ends:
            ends[child] = "stopped" if "T (stopped)" in state(child) else "hangs"
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return [ends[child] for child in children]


def state(child):
    try:
        return Path(f"/proc/{child}/status").read_text()
    except OSError:
        return ""


def start(number, rank, job):
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        log = Path(f"{number}.{rank}.err").open("w", buffering=1)  # noqa: SIM115  open till the end
        os.dup2(log.fileno(), 2)
        run(number, rank, job)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    registry.patches()
    gc.freeze()
    for number, job in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        children = [start(number, rank, job) for rank in range(job["world"])]
        Path(f"{number}.exit.json").write_text(json.dumps(wait(children, job.get("seconds", 90))))
