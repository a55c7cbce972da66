"""A request to a server that runs beside the training, in a thread of the main process.

The thread only talks HTTP: no collectives, no random numbers, no tensors of the training. Whatever needs the server
next (a sync, a proof, an evaluation's completions) first waits for the request, so the server's weights do not change
while it runs. The completions, or an error, are kept until the main thread asks for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from grpo_lab.engines.vllm.talk import REQUEST
from grpo_lab.threads import in_thread

#: Seconds of one wait of the main thread, which handles signals between two waits.
LOOK = 5.0


class BackgroundRequest:
    """One request to a server for completions of ``prompts``, sent in a thread as soon as the object is made.

    Args:
        ask: sends the request and returns the server's answer.
        prompts: token ids.
        version: number of optimizer steps that the policy whose weights the server holds had taken.

    Attributes:
        waited: seconds that the main thread has waited for the completions.
        taken: whether ``completions`` has returned them.
    """

    def __init__(self, ask: Callable[[], dict[str, Any]], prompts: list[list[int]], version: int) -> None:
        self.version = version
        self.waited = 0.0
        self.taken = False
        self._prompts = prompts
        self._answer = in_thread(ask, REQUEST)

    def wait(self) -> None:
        """Wait until the server has answered."""
        if self._answer.done():
            return
        start = time.monotonic()
        while not wait([self._answer], LOOK).done:
            pass
        self.waited += time.monotonic() - start

    def completions(self, prompts: list[list[int]], **_: Any) -> dict[str, Any]:
        """Return the server's answer, or raise the request's error; called in place of ``LabVLLMClient.generate``.

        Raises:
            RuntimeError: ``prompts`` are not those of the request. Only a team's code that gives other rows when it is
                called a second time causes that.
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
