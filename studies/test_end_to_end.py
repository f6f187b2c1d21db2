"""The tool that measures the package's own share: its parts run, and give what they say."""

import end_to_end
import pytest


def test_the_page_gets_every_part(data, tmp_path, monkeypatch):
    monkeypatch.setattr(end_to_end, "LENGTHS", (64,))
    monkeypatch.setattr(end_to_end, "TOKENS", 128)
    monkeypatch.setattr(end_to_end, "BLOCK", 32)
    monkeypatch.setattr(end_to_end, "BATCH", 1)
    monkeypatch.setattr(end_to_end, "STEPS", 2)
    monkeypatch.setattr(end_to_end, "MODULES", 26)
    books = tmp_path / "text/books"
    for name in ("train", "eval"):
        (books / name).mkdir(parents=True)
        (books / name / "a.md").write_text("It was the best of times, it was the worst of times. " * 40)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/books-1m").symlink_to(data / "models/books-1m")
    page = tmp_path / "page.md"
    assert end_to_end.main(["--data", str(tmp_path), "--rounds", "1", "--output", str(page)]) == 0
    text = page.read_text()
    assert text.count("| the command, unpatched | the command, `elu1` |") == 2
    assert "| 64 | " in text
    assert "modules 0." in text
    assert str(tmp_path) not in text
    with pytest.raises(SystemExit):
        end_to_end.main(["--data"])


def test_patching_counts_modules():
    assert "modules 0." in end_to_end.patching("elu1", 1)
