"""Rows for training and evaluation: benchmarks, generated problems of several kinds, and the prompts around questions.

Every loader returns a ``datasets.Dataset`` with the columns ``prompt`` (text or message list), ``solution`` (the final
answer as text), ``question``, ``template`` (name of the prompt template), and more. Errors are ValueErrors, which say
what was found, what is needed and which setting governs it; generators raise one, too, if they find fewer than ``n``
rows. Importing this package loads neither trl nor transformers; ``datasets`` is imported on the first call.
"""

from grpo_lab.data.benchmarks import load_gsm8k, load_humaneval, load_math, load_mbpp
from grpo_lab.data.made import SORTING_SPLITS, coding_tasks, countdown, sorting
from grpo_lab.data.prompts import TEMPLATES, ChatTemplate, TextTemplate, apply_template, find_template
from grpo_lab.data.proofs import proofs
from grpo_lab.data.rows import load_file
from grpo_lab.data.word_problem_families import FAMILIES
from grpo_lab.data.word_problems import WordProblem, iter_word_problems, word_problems

__all__ = [
    "FAMILIES",
    "SORTING_SPLITS",
    "TEMPLATES",
    "ChatTemplate",
    "TextTemplate",
    "WordProblem",
    "apply_template",
    "coding_tasks",
    "countdown",
    "find_template",
    "iter_word_problems",
    "load_file",
    "load_gsm8k",
    "load_humaneval",
    "load_math",
    "load_mbpp",
    "proofs",
    "sorting",
    "word_problems",
]
