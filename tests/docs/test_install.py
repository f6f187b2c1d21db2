"""A wheel works without the repository; the core needs torch and transformers only, and no patch by name."""

import ast
import os
import subprocess
import sys
import zipfile

from helpers.paths import ROOT

HEAVY = ("accelerate", "datasets", "evaluate", "peft", "matplotlib", "jinja2", "tqdm")

INSIDE = """
import sys
import hf_linattn
assert hf_linattn.__file__.startswith(sys.argv[1]), hf_linattn.__file__
from transformers import LlamaConfig, LlamaForCausalLM
heavy = [name for name in sys.argv[2].split(",") if name in sys.modules]
import hf_linattn.patches, hf_linattn.eval, hf_linattn.eval.report, hf_linattn.demo
names = hf_linattn.available_patches()
assert {"elu1", "softmax", "softmax1", "logn"} <= set(names), names
assert all(names.values())
model = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                     num_attention_heads=1))
hf_linattn.patch_model(model, "elu1")
assert "elu1" in str(hf_linattn.describe(model))
print("works", *heavy)
"""


def quietly(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_works_outside_the_repository(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    # a copy, so that parallel tests do not share build/
    copy = tmp_path / "copy"
    quietly("cp", "-r", *(str(ROOT / name) for name in ("hf_linattn", "patches", "eval")), str(make(copy)))
    quietly("cp", *(str(ROOT / name) for name in ("pyproject.toml", "README.md", "LICENSE")), str(copy))
    quietly(*build, "-w", str(tmp_path), str(copy))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not source_files() - set(archive.namelist())
    target = tmp_path / "target"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    quietly(*install, "--target", str(target), str(wheel))
    environment = {**os.environ, "PYTHONPATH": str(target), "HF_HUB_OFFLINE": "1"}
    out = quietly(
        sys.executable,
        "-c",
        INSIDE,
        str(target),
        ",".join(HEAVY),
        cwd=make(tmp_path / "elsewhere"),
        env=environment,
    )
    assert out.split()[0] == "works"


def source_files():
    """What a wheel must hold: code, templates of pages, sources of kernels, the mark of type hints."""
    folders = {"hf_linattn": "hf_linattn", "patches": "hf_linattn/patches", "eval": "hf_linattn/eval"}
    return {
        f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, inside in folders.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".j2", ".h", ".cpp") or path.name == "py.typed"
    }


def make(folder):
    folder.mkdir()
    return folder


def imports(path):
    """Every module that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = "hf_linattn" if node.level else ""
            yield ".".join(filter(None, [package, node.module]))
            yield from (".".join(filter(None, [package, node.module, alias.name])) for alias in node.names)


def test_core_imports_no_patch_and_no_evaluation():
    for path in (ROOT / "hf_linattn").rglob("*.py"):
        names = [
            name
            for name in imports(path)
            if name.startswith(("hf_linattn.patches", "hf_linattn.eval", "patches", "eval"))
        ]
        assert not names, f"{path.name} imports {names}"
