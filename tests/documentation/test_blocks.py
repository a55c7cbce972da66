"""Every code block of README, docs and recipes runs, in a tiny form where it trains; a new page is found by itself.

    python   executed, a page's blocks in order and in one namespace; hub names become a tiny random model and the
             shared real data, sizes of a training shrink (``tiny_settings``); ``expression  # literal`` is compared
             with the literal
    yaml     read as part of a recipe: sections, ``LabConfig``, and names of rewards; ``---`` separates alternatives
    bash     each command parsed by whoever would run it, recipes read with their overrides, `make -n`, files looked up
    text     output; holds no command

``<!-- needs: gpu -->`` (server, hours, network) before a Python block: it is compiled and its imports are made, and not
run. Commands in the text and in indented lines are parsed like those in fences.
"""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from documentation.blocks import COMMANDS, ROOT, Block, blocks, loose_commands, pages
from documentation.commands import ON_CPU, check_line
from grpo_lab.labs.arms import Arms
from grpo_lab.labs.experiment import Options
from grpo_lab.labs.lab_file import LabFile
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.rounds_recipe import METHODS, rounds_recipe_from
from grpo_lab.pipelines.runner import entries_of
from grpo_lab.recipe import build
from grpo_lab.recipe.job import lab_config, numbers_read
from grpo_lab.recipe.sections import read_recipe, recipe_from
from grpo_lab.recipe.yaml import read_yaml
from grpo_lab.settings import read
from grpo_lab.trainer.config import LabConfig
from grpo_lab.trainer.settings.parse import reward_schedules

LANGUAGES = ("python", "yaml", "bash", "text")
PAGES = pages()
ALL = [block for page in PAGES for block in blocks(page)]
BASE = ROOT / "recipes" / "quickstart" / "dr_grpo.yaml"
#: what a page's training becomes: two generations of four short completions
TINY: dict[str, Any] = {
    **ON_CPU, "max_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "num_generations": 2,
    "max_completion_length": 8, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
ROWS = 40


def of(language: str) -> list[Any]:
    return [pytest.param(block, id=block.where) for block in ALL if block.language == language]


def test_pages_and_languages() -> None:
    assert {"README.md", "docs/add_an_algorithm.md", "docs/algorithms/group_rewards.md"} <= {
        block.page for block in ALL
    }
    strange = [f"{block.where}: {block.language or 'no language'}" for block in ALL if block.language not in LANGUAGES]
    assert not strange, f"each fence says one of {LANGUAGES}: {strange}"


@pytest.mark.parametrize("block", of("text"))
def test_text_holds_no_command(block: Block) -> None:
    typed = [line for line in block.code.splitlines() if line.split(" ")[0].lstrip("$ ") in COMMANDS]
    assert not typed, f"{block.where}: these are commands; call the block bash: {typed}"


@pytest.mark.parametrize("block", of("bash"))
def test_bash(block: Block) -> None:
    lines = block.code.replace("\\\n", " ").splitlines()
    assert sum(check_line(line) for line in lines if line.strip()) >= 1, f"{block.where} holds no command"


@pytest.mark.not_fast(cases="docs/compatibility.md")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text(page: Path) -> None:
    for command in loose_commands(page):
        try:
            check_line(command.code)
        except Exception as error:
            raise AssertionError(f"{command.where}: {command.code.strip()}: {error}") from error


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml(block: Block) -> None:
    """Each document is laid over the quick start's recipe and read to the end."""
    for document in yaml.compose_all(block.code):
        keys = [key.value for key, _ in document.value]
        assert len(keys) == len(set(keys)), f"{block.where}: a key twice; alternatives are separated by `---`: {keys}"
    for written in yaml.safe_load_all(block.code):
        if written.get("method") in METHODS:  # a recipe of `grpo-lab rounds`, whole
            rounds_recipe_from(written)
            continue
        if "stages" in written:
            entries_of(pipeline_from(written))
            continue
        if "arms" in written:  # a lab.yaml, whole
            lab = Arms(read(LabFile, written), ROOT / "docs")
            options = Options(recipe=None, start=None, set=[], folder=Path("nowhere"))
            for arm in lab.said.cells:
                lab_config(numbers_read(read_recipe(lab.recipe(options), lab.changes(arm, 0, options))))
            continue
        base = read_yaml(BASE)
        if "mixture" in written:
            base = {name: value for name, value in base.items() if name not in ("data", "rewards")}
        base.pop("objective", None) if "objective" in written else None
        recipe = recipe_from({**base, **written, **ON_CPU})
        config = lab_config(numbers_read(recipe))
        rewards = {getattr(reward, "__name__", "") for reward in map(build.build_reward, recipe.rewards)}
        unknown = set(reward_schedules(config.reward_schedules)) - rewards
        assert not unknown, f"{block.where}: `reward_schedules` names {unknown}; rewards are logged as {rewards}"


@pytest.fixture(scope="session")
def page_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages' hub model becomes: room for a GSM8K question in letters."""
    from grpo_lab.testing import tiny_model

    folder = tmp_path_factory.mktemp("page_model")
    model, tokenizer = tiny_model("qwen2", hidden_size=32, num_layers=1, num_heads=2, max_positions=4096)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def here(grpo_lab_data: Path, page_model: Path, tmp_path: Path) -> dict[str, str]:
    """Hub names of the pages → what is on this machine: the tiny model, and the first rows of the real data."""
    for split in ("train", "test"):
        rows = (grpo_lab_data / "gsm8k" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / f"{split}.jsonl").write_text("".join(rows[:ROWS]), encoding="utf-8")
    return {r"Qwen/[\w.-]+": str(page_model), r"openai/gsm8k": str(tmp_path)}


@pytest.fixture
def tiny_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Trainings of a page are short and on the CPU, whatever it says; nothing is written outside of a temporary
    folder."""
    write = LabConfig.__init__

    def short(self: Any, *args: Any, **settings: Any) -> None:
        write(self, *args, **{**settings, **TINY})

    monkeypatch.setattr(LabConfig, "__init__", short)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def space(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """A page's namespace, a module of its own so that what it declares has an address."""
    module = types.ModuleType("a_page_of_the_docs")
    sys.modules[module.__name__] = module
    yield vars(module)
    del sys.modules[module.__name__]


@pytest.mark.not_fast(cases=["README.md", "docs/algorithms/accuracy_reward.md", "docs/algorithms/code_reward.md"])
@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("page", sorted({block.page for block in ALL if block.language == "python"}))
def test_python(page: str, here: dict[str, str], tiny_settings: None, space: dict[str, Any]) -> None:
    for block in blocks(ROOT / page):
        if block.language != "python":
            continue
        tree = ast.parse(block.code, block.where)
        if block.needs is not None:
            tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        code = block.code
        for name, place in here.items():
            code = re.sub(rf"([\"']){name}\1", repr(place), code)
        _run(block, code if block.needs is None else ast.unparse(tree), space)


def _run(block: Block, code: str, space: dict[str, Any]) -> None:
    lines = code.splitlines()
    for node in ast.parse(code).body:
        comment = lines[node.end_lineno - 1][node.end_col_offset :].strip() if node.end_lineno else ""
        try:
            if isinstance(node, ast.Expr):
                seen = eval(compile(ast.Expression(node.value), block.where, "eval"), space)
                _compare(seen, comment)
            else:
                exec(compile(ast.Module([node], []), block.where, "exec"), space)
        except Exception as error:
            line = block.line + node.lineno - 1
            raise AssertionError(f"{block.page}:{line}: {type(error).__name__}: {error}") from error


def _compare(seen: Any, comment: str) -> None:
    """``reward(…)  # [1.0]``: a literal after an expression is what comes out."""
    try:
        said = ast.literal_eval(comment.removeprefix("#").strip())
    except (ValueError, SyntaxError):
        return
    assert seen == said, f"gives {seen!r}, and the page says {said!r}"
