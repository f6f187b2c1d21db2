"""Code blocks of README and docs run, in order, from a copy of the checkout's layout; links are checked."""

import re
import subprocess

import pytest
from helpers import docs_tables
from helpers.paths import ROOT
from helpers.selection import rest_full

from tools.catalogue.pages import slug

PAGES = sorted(
    p.relative_to(ROOT).as_posix()
    for p in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
)
LINKED = sorted(
    [
        *PAGES,
        *(p.relative_to(ROOT).as_posix() for p in [ROOT / "CHANGELOG.md", *ROOT.glob("examples/*/*.md")]),
        *(p.relative_to(ROOT).as_posix() for p in ROOT.glob("studies/**/*.md")),
    ]
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OWN_TESTS = ("make demo", "make laptop", "make test")  # run by .ci/run and by tests/demo


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_are_in_a_language_that_is_tested(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(re.findall("^```", text, re.MULTILINE)) == 2 * len(BLOCK.findall(text)), (
        "a block has no language"
    )
    for language, _ in BLOCK.findall(text):
        assert language in ("python", "bash", "text", "toml", "json"), (
            f"{page}: a block in {language!r} would not be tested"
        )


# what it exports, of a larger model, tests/patching/test_export.py exports too
LONG = "docs/export.md"


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # short examples open files as people do
@pytest.mark.parametrize("page", rest_full(PAGES, [page for page in PAGES if page != LONG]))
def test_code_blocks_run(page, checkout):
    namespace = {"__name__": "docs"}
    for language, code in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(code, page, "exec"), namespace)
        elif language == "bash":
            run(code)


def run(code):
    commands = code.replace("\\\n", " ").strip().splitlines()
    for command in commands:
        if command.startswith(OWN_TESTS):
            continue
        done = subprocess.run(
            ["bash", "-euc", command], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"


def test_the_table_of_patches_is_the_registry():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert docs_tables.replaced(text, "patches", docs_tables.patch_table()) == text


def anchors(path):
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading.strip()) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|srcset)=\"([^\"]+)\"", text)
    for target in targets:
        if "://" not in target:
            name, _, anchor = target.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path / "README.md" if path.is_dir() else path), target


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    targets = {(ROOT / "docs" / target).resolve() for target in re.findall(r"\]\(([^)#]+)", index)}
    for page in ROOT.glob("docs/*.md"):
        assert page.resolve() in targets or page.name == "README.md", page.name


def test_the_changelog_begins_with_this_version():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)[1]
    heading = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert heading == "Unreleased" or heading.startswith(f"{version} - ")
