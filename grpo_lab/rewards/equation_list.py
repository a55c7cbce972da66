"""What a solution calculates, as a list: two texts with the same list are one way of solving (RFT, arXiv 2308.01825, section 3.3).

"Ann has 4 * 6 = 24 stamps. She keeps 24-5=19." -> ("4*6=24", "24-5=19")
"""

from __future__ import annotations

from grpo_lab.rewards.equations import judged


def equation_list(text: str) -> tuple[str, ...]:
    """The equations of ``text`` that can be read as arithmetic (``equations.judged``), in their order, without blanks.

    A chain a = b = c counts as two. Empty where the text states none: a bare answer, or reasoning in words.
    """
    return tuple("".join(f"{one.left}={one.right}".split()) for one in judged(text))


def calculates_right(text: str) -> bool:
    """Whether every equation of ``text`` that can be judged holds; true where there is none."""
    return all(one.holds for one in judged(text))


__all__ = ["calculates_right", "equation_list"]
