"""Result folders of every kind, as the commands leave them, for the report."""

from helpers.fixtures_demo import TRAIN_CSV, finetune_results, perplexity_results, write

VERSIONS = {"python": "3.11", "torch": "2.13.0"}
LINEAR = {"model_type": "llama", "linattn": {"version": 1}}


def model(folder, patched=False):
    """A folder that is a model as far as the report looks."""
    write(folder / "config.json", LINEAR if patched else {"model_type": "llama"})
    return folder


def tuned(folder, base, patch=None, tokens=204800, **arguments):
    results = finetune_results(folder, patch, 5.0, 4.0)
    results |= {"steps": 50, "tokens": tokens, "global_batch": 8}
    given = {"model": str(base), "data": "train.txt", "block_size": 512, "lr": 1e-3}
    results["arguments"] |= given | arguments
    write(model(folder, patch is not None) / "results.json", results)
    write(folder / "train.csv", TRAIN_CSV)
    return folder


def converted(folder, base, stages=("transfer", "distill")):
    for number, name in enumerate(stages, 1):
        tuned(folder / name, base, "hedgehog", tokens=1000 * number)
    arguments = {"model": str(base), "output_dir": str(folder), "target": "output", "data": "train.txt"}
    plan = {"command": f"python -m hf_linattn.convert --output-dir {folder}", "arguments": arguments}
    write(folder / "plan.json", {**plan, "stages": list(stages)})
    write(folder / "validation.json", {"original": 3.0, "swapped": 5.0, "transfer": 4.5, "distill": 3.5})
    return folder


def perplexity(folder, source, values, baseline=None, **arguments):
    """baseline: (source, label, values)."""
    results = perplexity_results(source, values, **arguments)
    results["models"][0] |= {"patch": arguments.get("patch"), "options": {}, "rope_scaling": None}
    if baseline is not None:
        source, label, values = baseline
        more = perplexity_results(source, values)
        results["rows"] += [{**row, "model": label} for row in more["rows"]]
        results["models"].append({"label": label, "source": str(source), "patch": None, "options": {}})
    write(folder / "results.json", results)
    return folder


def recall(folder, curves, able="yes", **arguments):
    """curves: label -> (source, patch, accuracy); the first is the unpatched one."""
    rows, models = [], []
    for label, (source, patch, accuracy) in curves.items():
        models.append({"label": label, "source": str(source), "patch": patch, "options": {}})
        rows += [
            {
                **{"task": task, "model": label, "length": length, "depth": depth, "samples": 10},
                **{"accuracy": accuracy, "stderr": 0.1, "chance": 0.01, "logprob": -1.0, "answers": 10},
                **{"choice": None, "choice_chance": None},
            }
            for task in ("mqar", "passkey")
            for length in (128, 512)
            for depth in (0.0, 1.0)
        ]
    said = {"able": able, "text": f"{next(iter(curves))} cannot do mqar"}
    content = {
        "format": "hf_linattn.recall/1",
        "complete": True,
        "command": "python -m hf_linattn.eval.recall",
        "arguments": {"lengths": [128, 512], "depths": [0.0, 1.0], "samples": 10, "seed": 0, **arguments},
        "versions": VERSIONS,
        "models": models,
        "verdicts": [{"task": "mqar", **said}],
        "rows": rows,
    }
    write(folder / "results.json", content)
    return folder


def generation(folder, original, curves, prompts=((1, 2), (3, 4))):
    """curves: label -> (source, kl)."""
    summaries = [
        {
            **{"model": label, "prompts": 2, "repetition": 0.1, "agreement": 7.5, "identical": 0, "kl": kl},
            **{"kl_stderr": 0.1, "top1": 0.9, "buckets": []},
        }
        for label, (_, kl) in curves.items()
    ]
    own = {**summaries[0], "model": "original", "agreement": None, "kl": None}
    content = {
        "format": "hf_linattn.generation/1",
        "complete": True,
        "command": "python -m hf_linattn.eval.generation",
        "arguments": {"new_tokens": 16},
        "versions": VERSIONS,
        "original": {"source": str(original), "note": ""},
        "models": [{"label": n, "source": str(s), "patch": None} for n, (s, _) in curves.items()],
        "prompts": [list(prompt) for prompt in prompts],
        "summaries": [own, *summaries],
    }
    write(folder / "results.json", content)
    return folder


def cost(folder, source, label, speed=1000.0, machine="EPYC", batch=1, patched=True):
    def row(name, length, measured, size):
        own = name == "unpatched"
        values = {"tokens_per_second": speed * (2 if own else 1), "low": speed / 2, "high": speed * 2}
        values |= dict.fromkeys(("ratio", "ratio_low", "ratio_high"), None if own else 0.5)
        numbers = {
            f"{kind}_{what}": value for kind in ("prefill", "decode") for what, value in values.items()
        }
        ratio = 0.25 if name != "unpatched" else None
        sizes = {"cache_bytes": size * batch, "bytes_ratio": ratio, "peak_bytes": size * batch}
        found = {"model": name, "length": length, "measured": measured, **sizes, **numbers}
        empty = ("peak_bytes", *numbers) if not measured else ()
        return found | dict.fromkeys(empty)

    names = [label, "unpatched"] if patched else ["unpatched"]
    sizes = {label: lambda n: 4096, "unpatched": lambda n: 1024 * n}
    rows = [row(name, n, n < 4096, sizes[name](n)) for name in names for n in (512, 2048, 131072)]
    told = {"device": "cpu", "machine": machine, "threads": 1, "dtype": "float32"}
    content = {
        "format": "hf_linattn.cost/1",
        "complete": True,
        "command": "python -m hf_linattn.eval.cost",
        "arguments": {"batch_size": batch, "new_tokens": 16},
        "versions": VERSIONS,
        "models": [{"label": label, "source": str(source), "patch": None, "options": {}}],
        "rows": rows,
        "run": told,
        "notes": [],
    }
    write(folder / "results.json", content)
    return folder


def branches(folder, source):
    rows = [
        {"model": name, "length": length, "perplexity": 10.0 + length + index, "nats": 3.0}
        for index, name in enumerate(("both", "window"))
        for length in (512, 1024)
    ]
    content = {
        "format": "hf_linattn.branches/1",
        "complete": True,
        "command": "python -m hf_linattn.eval.branches",
        "arguments": {"model": str(source), "patch": None, "options": {}},
        "versions": VERSIONS,
        "rows": rows,
        "sentences": ["at 512 tokens the window does the work"],
    }
    write(folder / "results.json", content)
    return folder


def everything(folder):
    """A base, a control, a patched and a converted model, with results of every kind about them."""
    base = model(folder / "models" / "base")
    values = {512: 20.0, 1024: 40.0}
    control = tuned(folder / "out" / "runs" / "control", base)
    elu1 = tuned(folder / "out" / "runs" / "elu1", base, "elu1")
    hedgehog = converted(folder / "out" / "hedgehog", base)
    out = folder / "out" / "measured"
    start = (base, "base", values)
    perplexity(out / "control", control, {512: 16.0, 1024: 32.0}, start)
    perplexity(out / "elu1", elu1, {512: 30.0, 1024: 31.0}, start)
    perplexity(out / "hedgehog", hedgehog / "distill", {512: 25.0, 1024: 26.0})
    curves = {"base": (base, "unpatched", 0.9), "elu1": (elu1, None, 0.25)}
    recall(out / "recall", curves)
    generation(out / "generation", base, {"elu1": (elu1, 0.5), "distill": (hedgehog / "distill", 0.25)})
    cost(out / "cost-elu1", elu1, "elu1")
    cost(out / "cost-base", base, "base", patched=False)
    branches(out / "branches", hedgehog / "distill")
    return folder / "out"


def comparison(folder):
    """An original, a control and two patches, with samples; numbers as of a model trained at 512 tokens."""
    curves = {
        "unpatched": (None, {512: 16.0, 1024: 115.0, 8192: 202.0}),
        "control": (None, {512: 15.0, 1024: 110.0, 8192: 200.0}),
        "elu1": ("elu1", {512: 45.0, 1024: 45.5, 8192: 46.0}),
        "softmax1": ("softmax1", {512: 15.1, 1024: 109.0, 8192: 201.0}),
    }
    sources = {"unpatched": model(folder / "base")}
    for name, (patch, values) in curves.items():
        if name != "unpatched":
            sources[name] = tuned(folder / "runs" / name, sources["unpatched"], patch)
        perplexity(folder / "perplexity" / name, sources[name], values)
    states = [
        {"model": str(s), "state_bytes": 16896 * (n == "elu1"), "bytes_per_token": 1024 * (n != "elu1")}
        for n, s in sources.items()
    ]
    samples = [
        {"model": str(s), "prompt": 0, "text": f"</pre><script>alert('{index}')"}
        for index, s in enumerate(sources.values())
    ]
    content = {"models": states, "prompts": ["x" * 1000 + " <b>end"], "samples": samples}
    write(folder / "samples.json", content)
    return folder
