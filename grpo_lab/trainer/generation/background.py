"""A request to a server that runs beside the training, in a thread of the main process.

The thread talks HTTP and nothing else: no collective, no random number, no tensor of the training. Whoever wants the
server next (a sync, a proof, an evaluation's completions) waits for the request first, so weights never change under
it. Its completions are kept meanwhile, and so is an error, which the main thread meets where it asks for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from grpo_lab.engines.vllm.talk import in_thread

#: seconds between two looks of the main thread, in which signals are heard
LOOK = 5.0


class BackgroundRequest:
    """Completions of ``prompts`` (token ids), which ``ask`` is getting from the moment that this object is made.

    Attributes:
        version: optimizer steps that the policy had taken whose weights the server holds.
        waited: seconds that the main thread has waited for the completions.
        taken: whether they were handed over.
    """

    def __init__(self, ask: Callable[[], dict[str, Any]], prompts: list[list[int]], version: int) -> None:
        self.version = version
        self.waited = 0.0
        self.taken = False
        self._prompts = prompts
        self._answer = in_thread(ask)

    def wait(self) -> None:
        """Return when the server is done with it."""
        if self._answer.done():
            return
        start = time.monotonic()
        while not wait([self._answer], LOOK).done:
            pass
        self.waited += time.monotonic() - start

    def completions(self, prompts: list[list[int]], **_: Any) -> dict[str, Any]:
        """Return the server's answer, or raise its error; stands in for ``LabVLLMClient.generate``.

        Raises:
            RuntimeError: it is of other prompts, which can only come of code that reads the data loader by itself.
        """
        if prompts != self._prompts:
            raise RuntimeError(
                "the completions that were begun one generation batch ahead (`rollout.overlap: 1`) are of other "
                "prompts than the batch that is now trained on: a team's `get_batch_samples`, `_tokenize_prompts` or "
                "data loader gives other rows the second time; leave `rollout.overlap` out, or mend that"
            )
        answer = self._answer.result()
        self.taken = True
        return dict(answer)
