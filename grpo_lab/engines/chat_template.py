"""A model's chat template, rendered within limits: it is a program that came with the model."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from grpo_lab.signals import handle, put_back

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 20.0
BYTES = 1 << 30
CHARACTERS = 10_000_000
_USED = Path("/proc/self/statm")


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
    """The text of ``messages`` by the tokenizer's chat template.

    Raises:
        ValueError: the template fails on them, leaves its sandbox, or takes more than any prompt needs.
    """
    try:
        with _bounded():
            text = str(tokenizer.apply_chat_template([dict(one) for one in messages], tokenize=False, **how))
    except Exception as error:  # of jinja2, of its sandbox, or of the template's own arithmetic
        said = (
            f"it needs more than {BYTES >> 30} GiB" if isinstance(error, MemoryError) else " ".join(str(error).split())
        )
        raise ValueError(f"the chat template cannot render a prompt: {type(error).__name__}: {said[:500]}") from error
    if len(text) > CHARACTERS:
        raise ValueError(
            f"the chat template makes {len(text):,} characters of one prompt; at most {CHARACTERS:,} are taken"
        )
    return text


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Memory where Linux says what is used; time in the main thread, where signals come, between two steps."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = BYTES + (int(_USED.read_text().split()[0]) * resource.getpagesize() if _USED.is_file() else 0)
    before = handle(_late, signal.SIGALRM)
    try:
        if limit > BYTES and (soft == resource.RLIM_INFINITY or limit < soft):
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        if before:
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
        yield
    finally:
        if before:
            signal.setitimer(signal.ITIMER_REAL, 0)
            put_back(before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _late(*_: Any) -> NoReturn:
    raise TimeoutError(f"it is not done after {SECONDS:g} seconds")
