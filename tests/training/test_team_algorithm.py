"""A team's module registers an algorithm with a knob of its own; a recipe names it. Nothing inside ``grpo_lab`` knows
of it.

It is mirror descent under another name, with ``pull`` for τ, so that it must give mirror descent's weights to the last
bit: trained with the real pipeline, stopped after two steps and resumed by a fresh process of the command line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import forked
from grpo_lab.pipelines.dry_run import plan_of_training as dry_run
from grpo_lab.pipelines.train import train
from grpo_lab.recipe.sections import recipe_from

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tables")]
ROOT = Path(__file__).resolve().parents[2]

TEAM = '''
from dataclasses import dataclass
from typing import ClassVar

from grpo_lab import register_advantage, register_aggregation, register_objective
from grpo_lab.batch import masked_sum, safe


@register_objective(
    "team_pull", advantage="team_centred", aggregation="team_sum", source="a page of the team's", paper={"pull": 0.1}
)
@dataclass(frozen=True)
class Pull:
    """-A log p(y_t) + pull/2 * R * (log p(y_t) - log p_i(y_t)), R the sum of these differences."""

    pull: float = 0.1
    reads_ratio: ClassVar[bool] = False
    whole_response: ClassVar[bool] = True

    def __call__(self, batch):
        moved = safe(batch.logps - batch.proximal_logps, batch.mask)
        response = masked_sum(moved, batch.mask, dim=-1).unsqueeze(-1)
        return -batch.advantages * batch.logps + 0.5 * self.pull * response * moved


@register_advantage("team_centred")
def centred(rewards, group_size):
    from grpo_lab.advantages import GroupMean

    return GroupMean()(rewards, group_size)


@register_aggregation("team_sum")
def summed(loss, mask, denominators):
    return masked_sum(loss, mask) / denominators.rows


def vowels(completions, **_):
    return [sum(c in "aeiou" for c in str(text)) / 10 for text in completions]
'''
GOOD: dict[str, Any] = {
    "name": "team",
    "model": {"tiny": {"hidden_size": 16, "num_layers": 1, "initializer_range": 0.2}},
    "data": {"loader": "word_problems", "n": 32},
    "rewards": ["algorithm_team:vowels"],
    "objective": {"name": "algorithm_team:team_pull", "pull": 0.5},
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "num_iterations": 2,
    "max_completion_length": 6,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "seed": 0,
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "algorithm_team.py").write_text(TEAM)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("algorithm_team", None)
    sys.path[:] = [place for place in sys.path if place != str(tmp_path)]


def weights(folder: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(f"{folder}/model.safetensors")
    return found


def same(one: str, other: str) -> bool:
    ours, theirs = weights(one), weights(other)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_from_a_recipe_to_a_resumed_run(home: Path) -> None:
    facts = dry_run(recipe_from({**GOOD, "output_dir": "dry"}))
    assert "objective=team_pull" in facts["algorithm"]
    assert "pull=0.5" in facts["algorithm"]
    assert facts["source"] == "a page of the team's; the paper's values: {'pull': 0.1}"

    train(recipe_from({**GOOD, "output_dir": "whole"}))
    record = json.loads(Path("whole/run.json").read_text())
    assert record["objective"] == {
        "objective": "team_pull",
        "advantage": "team_centred",
        "ratio": "token",
        "surrogate": "Pull",
        "knobs": "pull=0.5",
        "aggregation": "summed",
        "kl": "none",
    }
    assert (record["exact_update"]["batches"], record["exact_update"]["rows"]) == ("bins", "all"), (
        "asked, and found to pull"
    )
    card = Path("whole/README.md").read_text()
    for told in (
        "| objective | team_pull |",
        "| knobs | pull=0.5 |",
        "| source of the objective | a page of the team's |",
    ):
        assert told in card

    train(recipe_from({**GOOD, "objective": {"name": "mirror_descent", "tau": 0.5}, "output_dir": "theirs"}))
    assert same("whole", "theirs")
    train(recipe_from({**GOOD, "objective": {"name": "mirror_descent", "tau": 0.1}, "output_dir": "weaker"}))
    assert not same("whole", "weaker"), "the knob must matter"

    train(recipe_from({**GOOD, "max_steps": 3, "output_dir": "half"}))  # in the middle of a generation batch
    Path("r.yaml").write_text(yaml.safe_dump({**GOOD, "output_dir": "half"}))
    words = [str(ROOT / "scripts" / "train.py"), "--config", "r.yaml", "--resume"]
    done = forked.run(words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert same("half", "whole")


def test_what_the_recipe_gets_wrong_is_said(home: Path) -> None:
    for objective, said in (
        ({"name": "algorithm_team:team_pull", "pul": 0.5}, r"`objective` has no setting 'pul'; did you mean 'pull'\?"),
        ({"name": "algorithm_team:team_pull", "pull": "hard"}, "`objective.pull` is 'hard'; it must be a number"),
        ({"name": "algorithm_team:team_pull", "tau": 0.5}, "`objective.tau`=0.5 has no effect on the surrogate 'Pull'"),
        ({"name": "algorithm_team:team_push"}, "registers no objective 'team_push'"),
        ({"name": "algorithm_team:team_pull", "ratio": "product"}, "`objective.ratio`='product' has no effect"),
    ):
        with pytest.raises(ValueError, match=said):
            dry_run(recipe_from({**GOOD, "objective": objective, "output_dir": "dry"}))
