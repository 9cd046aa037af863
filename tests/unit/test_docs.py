"""The documentation site: it builds, every link leads somewhere, and no key or command is missing."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import proofs
import pytest

from orchestrator.config.spec import JobSpec

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The generated pages."""
    found = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert found
    assert found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.pages()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a broken link, or anything that is told, fails."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def test_pages_of_every_kind_are_there(site: Path) -> None:
    for name in ("index", "comparison", "reference/job-file", "reference/commands", "guides/runbook"):
        assert (site / f"{name}.html").is_file()


def test_a_page_fetches_nothing(site: Path) -> None:
    """Every script, style and picture of a page is a file of the site."""
    page = (site / "index.html").read_text()
    assert re.findall(r'(?:src|<link[^>]+rel="stylesheet"[^>]+href)="(https?:[^"]+)"', page) == []


def test_every_key_of_the_job_file_is_described(pages: dict[str, str]) -> None:
    page, schema = pages["reference/job-file.md"], JobSpec.model_json_schema()
    meanings = re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", page.replace("\\|", "or"), re.M)
    assert not [key for key, meaning in meanings if not meaning.strip()]
    keys = {key for key, _ in meanings}
    for definition in (schema, *schema["$defs"].values()):
        assert definition.get("properties", {}).keys() <= keys
    assert "see its keys |" not in re.sub(r"^.*object, see below.*$", "", page, flags=re.M)


def test_every_command_is_described(pages: dict[str, str]) -> None:
    page = pages["reference/commands.md"]
    for words in ("run", "cluster up", "checkpoint verify", "data prepare", "tune", "chaos"):
        assert f"## orchestrator {words}\n" in page
    assert "`--until`" in page


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_the_files_of_a_picture_are_there() -> None:
    """A picture of the architecture names files by their packages; none may be gone."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    blocks = re.findall(r"^```flow\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) == 4
    for name in re.findall(r"^  (\S+) \|", "".join(blocks), re.M):
        assert any((ROOT / package / name).exists() for package in ("orchestrator", ".")), name


def test_pictures_are_drawn(site: Path) -> None:
    page = (site / "architecture.html").read_text()
    assert page.count('role="img"') == 4
    assert "```flow" not in page


@pytest.mark.parametrize(
    "page",
    ["docs/glossary.md", "docs/architecture.md", "docs/reliability.md", "CONTRIBUTING.md", "README.md"],
)
def test_every_module_that_a_page_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:orchestrator|cluster|workloads|tests)/[\w/.-]+?)`", text)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_page_of_proofs_is_what_the_tests_say() -> None:
    """`python tests/proofs.py` writes it."""
    assert proofs.PAGE.read_text() == proofs.page(proofs.collected())
