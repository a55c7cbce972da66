"""``make docs``: built strictly, complete, and without anything from elsewhere, neither at building nor at reading."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from documentation.blocks import ROOT, pages

pytestmark = pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra `docs` is not installed: make docs")
SIDE = re.compile(r"<(?:script|link|img|iframe|source|video)\b[^>]*?\b(?:src|href)=[\"']?(?P<target>[^\"'\s>]+)")
#: nothing may be asked over the network while it is built: a proxy that nobody answers at
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, **NO_NETWORK, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = spec_from_file_location("docs_site", ROOT / "scripts" / "docs_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(site: Path, hook: ModuleType) -> None:
    assert (site / "index.html").is_file()
    for page in pages():
        name = page.relative_to(ROOT).as_posix()
        place = hook.FROM_OUTSIDE.get(name) or name.removeprefix("docs/")
        assert hook.FROM_OUTSIDE.get(name) or name.startswith("docs/"), (
            f"{name}: add it to FROM_OUTSIDE of docs_site.py"
        )
        built = site / re.sub(r"README\.md$", "index.md", place).replace(".md", ".html")
        assert built.is_file(), built


@pytest.mark.slow
def test_api_pages_hold_what_the_docstrings_say(site: Path) -> None:
    for page, said in {
        "trainer": ("LabTrainer", "LabConfig", "DrGRPOTrainer"),
        "objectives": ("Importance ratio", "Clipped", "fixed_budget"),
        "advantages": ("GroupMean", "LeaveOneOut"),
        "rewards": ("AccuracyReward", "KimiLengthReward", "group_reward"),
    }.items():
        text = (site / "api" / f"{page}.html").read_text(encoding="utf-8")
        assert not [name for name in said if name not in text], page


@pytest.mark.slow
def test_nothing_comes_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        asked = [seen["target"] for seen in SIDE.finditer(page.read_text(encoding="utf-8"))]
        assert asked
        assert not [target for target in asked if re.match(r"(https?:)?//", target)], page
        assert "mermaid" not in re.findall(r'class="([^"]*)"', page.read_text(encoding="utf-8")), (
            "the theme loads mermaid from a CDN"
        )


def test_links_between_the_repository_and_the_site(hook: ModuleType) -> None:
    def there(link: str, source: str, place: str) -> str:
        return hook._LINK.sub(lambda seen: hook.rewritten(seen, source, place, ROOT), link)

    assert there("[a](docs/algorithms)", "README.md", "index.md") == "[a](algorithms/README.md)"
    quick = "recipes/quickstart/README.md"
    assert there(f"[a](../{quick}#what-it-shows)", "docs/faq.md", "faq.md") == f"[a]({quick}#what-it-shows)"
    assert there("![p](../../docs/images/quickstart.png)", quick, quick) == "![p](../../images/quickstart.png)"
    for left in ("[a](no.md)", "[a](https://a.org/b)", "[a](#here)", "[a](../grpo_lab/batch.py)"):
        assert there(left, "docs/faq.md", "faq.md") == left


def test_a_list_and_a_table_begin_after_an_empty_line(hook: ModuleType) -> None:
    assert hook.with_empty_lines("Said:\n- a\n- b\n  c\n- d") == "Said:\n\n- a\n- b\n  c\n- d"
    assert hook.with_empty_lines("Said:\n| a |\n|---|\n| b |") == "Said:\n\n| a |\n|---|\n| b |"
    fenced = "```text\nSaid:\n- a\n```"
    assert hook.with_empty_lines(fenced) == fenced


def test_it_is_served_to_this_machine_alone_and_written_to_one_folder() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").splitlines()
    assert "dev_addr: 127.0.0.1:8001" in settings
    assert "site_dir: site" in settings
    assert "site/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
