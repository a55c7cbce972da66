"""The sources' sorting run on one screen: a net of width 4, not autoregressive, GRPO with centred rewards. Seconds of
CPU a seed.

    python recipes/lab/sorting/sources.py                 # the code's reward, seeds 0 to 4
    python recipes/lab/sorting/sources.py --kind exact    # 0/1: stalls
    python recipes/lab/sorting/sources.py --epsilon 0.2   # the clip as the summary of the run has it: learns faster

Formulas are the library's (advantage, clip, KL, reward); here stand the net and the loop. What the sources leave open,
and what was tried: README.md.
"""

import argparse
import copy
from statistics import fmean

import torch
from torch import Tensor, nn

from grpo_lab.advantages import GroupMean
from grpo_lab.objectives import Clipped, Denominators, KLTerm, Objective, TokenBatch, token_mean
from grpo_lab.rewards import SortingReward

L, V, WIDTH = 4, 10, 4
PROMPTS, EACH, OUTER, INNER = 128, 8, 200, 4
KINDS = ("inclusion_ordering", "inclusion_ordering_multiset", "distance", "exact")


class Net(nn.Module):
    """Embed; a matrix for each place of the prompt, summed into one vector; a matrix for each place of the answer; the
    embedding again, to V logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, WIDTH)
        self.encode = nn.Parameter(torch.randn(L, WIDTH, WIDTH) / WIDTH**0.5)
        self.decode = nn.Parameter(torch.randn(L, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, prompts: Tensor) -> Tensor:
        one = torch.einsum("bld,lde->be", self.embed(prompts), self.encode)
        return (torch.einsum("be,lef->blf", one, self.decode) @ self.embed.weight.T).log_softmax(-1)


def train(
    seed: int, kind: str = "inclusion_ordering", epsilon: float = 0.01
) -> tuple[list[dict[str, float]], list[list[str]]]:
    """Mean rewards of each iteration's samples, by every kind (``kind`` is the one that pays), and samples of the last
    to the eight prompts where code and formula differ most."""
    torch.manual_seed(seed)
    objective = Objective("sorting", Clipped(epsilon), token_mean, kl=KLTerm(0.02, "k3"))
    net, rewards = Net(), {name: SortingReward(name) for name in KINDS}
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)
    mask = torch.ones(PROMPTS * EACH, L, dtype=torch.bool)
    counts = Denominators(rows=len(mask), tokens=mask.numel(), budget=L)
    curve = []
    for iteration in range(OUTER):
        if iteration % 30 == 0:
            reference = copy.deepcopy(net)
        prompts = torch.randint(V, (PROMPTS, L)).repeat_interleave(EACH, 0)

        def chosen(model: nn.Module, answers: Tensor, prompts: Tensor = prompts) -> Tensor:
            return model(prompts).gather(-1, answers[..., None])[..., 0]

        with torch.no_grad():
            answers = torch.distributions.Categorical(logits=net(prompts)).sample()
            old, ref = chosen(net, answers), chosen(reference, answers)
        texts = [" ".join(map(str, row)) for row in answers.tolist()]
        scores = {name: torch.tensor(r(completions=texts, numbers=prompts.tolist())) for name, r in rewards.items()}
        curve.append({name: float(score.mean()) for name, score in scores.items()})
        advantages = GroupMean()(scores[kind], EACH)[:, None]
        for _ in range(INNER):
            logps = chosen(net, answers)
            batch = TokenBatch(logps, old, logps - old, advantages, mask, ref_logps=ref)
            optimizer.zero_grad()
            objective.loss(batch, counts).backward()
            optimizer.step()
    gap = scores["inclusion_ordering"] - scores["inclusion_ordering_multiset"]
    widest, which = (gap * 10 + scores["inclusion_ordering"]).view(PROMPTS, EACH).max(1)  # of each prompt's answers
    some = [int(prompt * EACH + which[prompt]) for prompt in widest.topk(8).indices]
    return curve, [[str(prompts[i].tolist()), texts[i], *(f"{scores[kind][i]:.0f}" for kind in KINDS)] for i in some]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0], help="the reward that pays")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--epsilon", type=float, default=0.01, help="width of the clip")
    args = parser.parse_args()
    runs = [train(seed, args.kind, args.epsilon) for seed in args.seeds]
    curves = [curve for curve, _ in runs]
    print(
        f"paid by {args.kind}, ε = {args.epsilon}, mean of {len(curves)} seeds\niteration "
        + " ".join(f"{name:>28s}" for name in KINDS)
    )
    for at in (0, 40, 80, 120, 160, 199):
        print(f"{at:9d} " + " ".join(f"{fmean(curve[at][name] for curve in curves):28.3f}" for name in KINDS))
    print(
        f"\neight answers of the last iteration on which the first two differ most, seed {args.seeds[0]}: "
        "prompt, answer, rewards in the same order"
    )
    for row in runs[0][1]:
        print("  ".join(row))


if __name__ == "__main__":
    main()
