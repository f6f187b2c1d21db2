"""The folder that make gpu-kit builds; nothing is downloaded here."""

import zipfile

import pytest
from helpers import gpu_kit
from helpers.paths import ROOT

build = gpu_kit.module("make_kit")


@pytest.fixture
def data(tmp_path):
    """A model and texts where HF_LINATTN_DATA has them."""
    root = tmp_path / "data"
    for name in ("models/books-1m/config.json", "text/books/eval/Emma.md", "text/books/train/Middlemarch.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


@pytest.fixture
def asked(monkeypatch):
    """What pip was asked for; its wheels appear."""
    calls = []

    def pip(*words):
        calls.append(words)
        folder = build.Path(words[words.index("-w" if words[0] == "wheel" else "-d") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        if words[0] == "wheel":
            (folder / "hf_linattn-1-py3-none-any.whl").write_text("")
        elif words[-1].startswith("datasets"):
            with zipfile.ZipFile(folder / "datasets-5-py3-none-any.whl", "w") as archive:
                wanted = ("dill<0.5,>=0.3.0", "multiprocess<0.71", "x; extra == 'y'")
                lines = [f"Requires-Dist: {text}\n" for text in wanted]
                archive.writestr("datasets-5.dist-info/METADATA", "".join(lines))

    monkeypatch.setattr(build, "pip", pip)
    return calls


def test_a_kit_holds_program_wheels_model_and_text(data, asked, tmp_path, capsys):
    folder = tmp_path / "build" / "kit"
    for _ in range(2):  # a kit is built again in place
        build.main(folder, str(data))
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {
        "gpu_check.py",
        "gpu_stages/work.py",
        "model/config.json",
        "text/Emma.md",
        "text/Middlemarch.md",
    } <= found
    assert "wheels/hf_linattn-1-py3-none-any.whl" in found
    assert not any(name.startswith(("make_kit.py", "gpu_stages/__pycache__")) for name in found)
    assert [path.name for path in folder.parent.iterdir()] == ["kit"]
    rest = asked[2]
    assert rest[rest.index("--python-version") + 1] == "3.12"
    assert "manylinux_2_28_x86_64" in rest
    assert {"dill<0.5,>=0.3.0", "multiprocess<0.71", "fla-core>=0.5.2,<0.7"} <= set(rest)
    assert any(word.startswith("accelerate>=") for word in rest)
    assert "gpu_check.py all" in capsys.readouterr().out


def test_what_is_refused_leaves_everything_as_it_was(data, asked, tmp_path, monkeypatch):
    for wrong in (None, "", str(tmp_path)):
        with pytest.raises(build.Refused, match="HF_LINATTN_DATA"):
            build.main(tmp_path / "kit", wrong)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("")
    with pytest.raises(build.Refused, match="is no kit"):
        build.main(mine, str(data))
    assert (mine / "thesis.tex").exists()
    assert not asked
    build.main(tmp_path / "kit", str(data))
    monkeypatch.setattr(build, "MOST", 10)
    with pytest.raises(build.Refused, match="carry less"):
        build.main(tmp_path / "kit", str(data))
    assert (tmp_path / "kit" / "gpu_check.py").exists()
    assert not list(tmp_path.glob(".kit-*"))


def test_pip_that_fails_is_one_line(capsys):
    with pytest.raises(build.Refused, match=r"^pip download failed: .*nowhere"):
        build.pip("download", "--no-index", "nowhere-to-be-found")


def test_versions_are_those_of_the_package():
    found = build.versions((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found["datasets"].startswith("datasets>=")
    assert found["accelerate"].startswith("accelerate>=")
    assert set(build.LACKING) - set(found) == {"dill", "multiprocess", "xxhash", "einops"}
