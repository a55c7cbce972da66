"""Rows for training and evaluation: real data sets, made problems of several kinds, and the prompts around their
questions.

Every loader gives a ``datasets.Dataset`` with the columns ``prompt`` (text or message list), ``solution`` (the final
answer as text), ``question``, ``template`` (name of the prompt template), and more. Importing this room loads neither
trl nor transformers; ``datasets`` is loaded on the first call.
"""

from grpo_lab.data.code_benchmarks import load_humaneval, load_mbpp
from grpo_lab.data.coding_tasks import coding_tasks
from grpo_lab.data.countdown import countdown
from grpo_lab.data.gsm8k import load_gsm8k
from grpo_lab.data.math import load_math
from grpo_lab.data.prompts import TEMPLATES, ChatTemplate, TextTemplate, apply_template, find_template
from grpo_lab.data.proofs import proofs
from grpo_lab.data.rows import load_file
from grpo_lab.data.sorting import SORTING_SPLITS, sorting
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
