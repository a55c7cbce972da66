"""A generation beside the training: asked in a thread of the main process, waited for before anything else is said to
the engine.

The thread talks HTTP and nothing else: no collective, no random number, no tensor of the training. Whoever wants the
engine next (a sync, a proof, an evaluation's completions) waits for it first, so weights never change under a running
batch; the answer is kept meanwhile, and so is an error, which the main thread meets where it takes the answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

#: seconds between two looks of the main thread, in which signals are heard
LOOK = 5.0


class Background:
    """Holds at most one request, of the main process.

    Attributes:
        version: optimizer steps that the policy had taken whose weights the engine held when it was asked.
        takes: whether the next generation is the one that was asked for; set by the training alone.
        taken: ``version`` of the answer that was handed over last; None where the generation was asked then and there.
        waited: seconds that the main thread has waited since the training last looked.
    """

    def __init__(self) -> None:
        self._answer: Future[Any] | None = None
        self._prompts: list[list[int]] = []
        self.version = 0
        self.takes = False
        self.waited = 0.0
        self.taken: int | None = None

    def begin(self, ask: Callable[[], Any], prompts: list[list[int]]) -> None:
        """Ask, and return at once. RuntimeError: an answer is still there."""
        if self._answer is not None:
            raise RuntimeError("a generation was begun while another's completions were not yet taken")
        answer: Future[Any] = Future()
        self._answer = answer
        self._prompts = prompts

        def run() -> None:
            try:
                answer.set_result(ask())
            except BaseException as failure:
                answer.set_exception(failure)

        threading.Thread(target=run, name="grpo_lab background generation", daemon=True).start()

    def settle(self) -> None:
        """Wait until the engine is idle; the answer stays."""
        if self._answer is None or self._answer.done():
            return
        start = time.monotonic()
        while not wait([self._answer], LOOK).done:
            pass
        self.waited += time.monotonic() - start

    def take(self, prompts: list[list[int]]) -> Any | None:
        """The answer to what was begun, or its error; None where nothing was. Call ``settle`` before. RuntimeError: it
        is of other prompts, which can only come of code that reads the data loader by itself."""
        answer = self._answer
        self._answer = None
        if answer is None:
            return None
        if prompts != self._prompts:
            raise RuntimeError(
                "the completions that were begun one generation batch ahead (`rollout.overlap: 1`) are of other "
                "prompts than the batch that is now trained on: a team's `get_batch_samples`, `_tokenize_prompts` or "
                "data loader gives other rows the second time; leave `rollout.overlap` out, or mend that"
            )
        self.taken = self.version
        return answer.result()

    def drop(self) -> None:
        """A training begins: what an earlier one left is waited for, and forgotten."""
        self.settle()
        self._answer, self.takes = None, False
