"""`python -m hf_linattn COMMAND`: commands of other packages, with patched folders known to them."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.kinds import DECODERS, KINDS
from helpers.paths import BASE, ROOT
from transformers import AutoTokenizer

import hf_linattn.__main__ as wrapper
from hf_linattn import from_pretrained, is_linear, patch_model
from hf_linattn.cli.main import exit_status
from hf_linattn.patching.batching import STATES, PatchedBatchingManager

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def status(argv):
    return exit_status(lambda: wrapper.run(argv), interrupted="", extra="serve")


@pytest.mark.parametrize("argv", [[], ["srve", "model"], ["finetune"]])
def test_an_unknown_command_is_one_line(argv, capsys):
    assert status(argv) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "serve, chat" in error
    assert (argv[0] if argv else "no command") in error
    assert ("python -m hf_linattn.finetune" in error) == (argv == ["finetune"])


def test_chat_without_a_server_is_one_line(monkeypatch, capsys):
    class ConnectError(Exception):  # httpx's, or httpx2's
        pass

    def chat():
        raise ConnectError("All connection attempts failed")

    command = SimpleNamespace(name="transformers", load=lambda: chat)
    monkeypatch.setattr(wrapper, "entry_points", lambda group: [command])
    assert status(["chat", "model", "http://localhost:1"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no server answers (All connection attempts failed): start `serve FOLDER` first" in error


def test_help_lists_every_command(capsys):
    assert status(["--help"]) == 0
    said = capsys.readouterr().out
    for name in wrapper.OWN:
        assert f"python -m hf_linattn.{name} " in said
        assert importlib.util.find_spec(f"hf_linattn.{name}")
    former = ("eval.branches", "eval.cost", "eval.harness_cli", "eval.sample")
    mains = {x.relative_to(ROOT / "eval").parts[0] for x in (ROOT / "eval").rglob("__main__.py")}
    mains = {f"eval.{name}" for name in mains} - {"eval.bench"} - set(former)
    assert mains == {name for name in wrapper.OWN if name.startswith("eval.")}


@pytest.mark.parametrize(
    ("argv", "seen"),
    [
        (["chat", "--help"], ["transformers", "chat", "--help"]),
        (["lm_eval", "--model", "hf"], ["lm_eval", "--model", "hf"]),
    ],
)
def test_a_command_gets_its_arguments(argv, seen, monkeypatch):
    found = []

    def entry_points(group):
        assert group == "console_scripts"
        command = SimpleNamespace(name=seen[0], load=lambda: lambda: found.extend(sys.argv))
        return [command]

    monkeypatch.setattr(wrapper, "entry_points", entry_points)
    monkeypatch.setattr(sys, "argv", ["-m"])
    with pytest.raises(SystemExit) as ended:
        wrapper.run(argv)
    assert not ended.value.code
    assert found == seen


def test_a_folder_that_cannot_be_read_is_one_line(tmp_path, monkeypatch, capsys, served):
    monkeypatch.setattr(sys, "argv", ["-m"])
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    for where, words in ((tmp_path, "not a valid JSON file"), (tmp_path / "no", "/no")):
        assert status(["serve", str(where), "--device", "cpu"]) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ")
        assert words in error
    for name in ("bare", "cut"):
        from_pretrained(BASE).save_pretrained(tmp_path / name)
    AutoTokenizer.from_pretrained(BASE).save_pretrained(tmp_path / "cut")
    with (tmp_path / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    for name, words in (("bare", "Unrecognized processing class"), ("cut", "deserializing header")):
        assert status(["serve", str(tmp_path / name), "--device", "cpu"]) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ")
        assert words in error


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert status(["serve", "somewhere"]) == 1
    assert "fastapi is not installed; pip install 'hf-linattn[serve]'" in capsys.readouterr().err


@pytest.fixture(scope="module", params=DECODERS)
def folder(request, tmp_path_factory):
    """A patched model with a chat template."""
    where = tmp_path_factory.mktemp("served")
    patch, options = KINDS[request.param]
    model = patch_model(from_pretrained(BASE, dtype=torch.float32), patch, options=options)
    model.save_pretrained(where)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(where)
    return where


@pytest.fixture
def served(monkeypatch):
    """Start `serve` without its socket: arguments -> a client of the application and the state behind it."""
    for package in (*wrapper.SERVER, "httpx"):
        pytest.importorskip(package)
    import uvicorn
    from starlette.testclient import TestClient
    from transformers.cli import serve

    monkeypatch.setattr(uvicorn.Server, "run", lambda self: None)
    monkeypatch.setattr(sys, "argv", ["-m"])
    started, states = [], []
    make = serve.Serve.__init__

    def start(**settings):
        server = object.__new__(serve.Serve)
        make(server, device="cpu", cb_num_blocks=40, cb_max_batch_tokens=256, **settings)
        client = TestClient(server.server.config.app)
        started.append(client)
        states.append(server._generation_state)
        return client, server._generation_state

    yield start
    for state in states:
        state.shutdown()


def ask(client, messages, folder):
    body = {"model": str(folder), "messages": messages, "max_tokens": 8, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def alone(folder, messages):
    model, tokenizer = from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    out = model.generate(ids, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("continuous_batching", [True, False])
def test_a_server_answers_as_the_model_does_and_keeps_the_state_of_a_chat(
    continuous_batching, folder, served
):
    client, state = served(force_model=str(folder), continuous_batching=continuous_batching)
    linear = is_linear(from_pretrained(folder))
    messages = [{"role": "user", "content": "Once upon a time there was a little girl"}]
    for turn in range(2):
        answer = ask(client, messages, folder)
        assert answer == alone(folder, messages)
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "and then"},
        ]
        if continuous_batching and linear:
            manager = state._cb_manager._cb
            assert isinstance(manager, PatchedBatchingManager)
            slots = manager.batch_processor.cache.cache_allocators[STATES].ledger.slots
            # the second turn took the slot of the first over, unless the tokenizer cuts the answer otherwise
            first, *later = slots
            assert not any(text[: len(first)] == first for text in later), turn
