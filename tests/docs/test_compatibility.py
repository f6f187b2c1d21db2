"""The table of clients names tests that exist, and the page is the one that its rows make."""

from helpers import compatibility


def test_rows_name_tests_that_exist():
    assert not compatibility.strange()


def test_a_test_that_does_not_exist_is_noticed(monkeypatch):
    row = [compatibility.works("linear gated", "patching/test_copies.py::test_nothing")]
    monkeypatch.setitem(compatibility.ROWS, "none", row)
    assert compatibility.strange() == ["none: no test patching/test_copies.py::test_nothing"]
    monkeypatch.setitem(compatibility.ROWS, "none", [compatibility.nothing("linear"), *row])
    assert len(compatibility.strange()) == 2
    monkeypatch.setitem(
        compatibility.ROWS, "none", [compatibility.works("linear", "nowhere.py::test_nothing")]
    )
    assert len(compatibility.strange()) == 1


def test_the_page_is_that_of_the_rows():
    assert compatibility.PAGE.read_text(encoding="utf-8") == compatibility.page()
