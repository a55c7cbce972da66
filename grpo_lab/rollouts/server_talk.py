"""Talk with a vLLM server that ends: waiting until it is up, requests with a time limit, and what they fail with.

TRL's client has retries but no time limit: a server that hangs, hangs the run. `bound_session` adds the limit;
`server_errors` turns what is left after the retries into `ServerGone`, for the trainer to save a checkpoint on.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_lab.rollouts.server_token import VARIABLE, token_of

CONNECT_TIMEOUT = 10.0
LIMITS = "limit: `rollout.server.request_timeout`, and `silence_timeout` for all but generations"


class ServerGone(ConnectionError):
    """The server did not come up in time, or no longer answers."""


def got(url: str, token: str | None, timeout: float = 5.0) -> tuple[int | None, bytes]:
    """Status and text of a GET, (None, b"") where there is no answer in time. The token does not follow a redirection."""
    request = urllib.request.Request(url)
    if token is not None:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return int(response.status), b"".join(_pieces(response, timeout))
    except urllib.error.HTTPError as error:
        return error.code, b""
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return None, b""


def _pieces(response: Any, seconds: float) -> Iterator[bytes]:
    """A body as it comes; TimeoutError where it is not over in time (urllib's limit is one of each piece)."""
    end = time.monotonic() + seconds
    while piece := response.read1(2**16):
        if time.monotonic() > end:
            raise TimeoutError
        yield piece


def answers(url: str, timeout: float = 5.0, token: str | None = None) -> bool:
    """True where a GET of `url` is answered with status 200 in time."""
    return got(url, token, timeout)[0] == 200


class TokenRefused(ValueError):
    """There is a server, and it does not take this process's token."""


def wait_until_ready(
    base_url: str,
    timeout: float,
    *,
    token: Callable[[], str | None] = lambda: None,
    process: subprocess.Popen[bytes] | None = None,
    log: Path | None = None,
    setting: str = "vllm_server_timeout",
    may_end: bool = False,
) -> float:
    """Wait for `GET /health` -> seconds waited. ServerGone after `timeout` seconds, or at once where `process` ended.

    `token`: read anew each time, since a server that is started again may make another. TokenRefused where it is refused twice.
    `setting`: what governs `timeout`. `may_end`: `process` may hand the server over to another and end with status 0.
    """
    start = time.monotonic()
    refused = 0
    while (status := got(f"{base_url}/health", token())[0]) != 200:
        refused = refused + 1 if status in (401, 403) else 0
        if refused == 2:
            raise TokenRefused(refusal(base_url, token() is not None))
        if process is not None and process.poll() is not None and not (may_end and process.returncode == 0):
            raise ServerGone(f"the vLLM server ended with status {process.returncode} before it was up.{log_tail(log)}")
        if time.monotonic() - start > timeout:
            raise ServerGone(
                f"no vLLM server at {base_url} within {timeout:.0f} s (setting {setting}). Start one with "
                f"`grpo-lab serve`, or look at why it does not come up.{log_tail(log)}"
            )
        time.sleep(0.5)
    return time.monotonic() - start


def refusal(base_url: str, had_token: bool) -> str:
    """What to do about a server that does not take the token."""
    what = "another token than this process has" if had_token else "a token, and this process has none"
    return (
        f"the server at {base_url} asks for {what} (or is asked by a name that it does not know, see `grpo-lab serve "
        f"--allow-host`): set {VARIABLE} as for the server, or name its token file in `rollout.server.token_file`, which must be "
        "there; `grpo-lab serve` says where it is"
    )


def log_tail(log: Path | None, lines: int = 15) -> str:
    """The end of a log file as text to append to a message."""
    if log is None or not log.is_file():
        return ""
    return "\n" + "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def bound_session(session: Any, *, timeout: float, retries: int = 2, backoff: float = 1.0) -> Any:
    """Give every request of a `requests.Session` a time limit, and a bounded number of retries -> the session.

    A request is repeated where the connection failed, broke, or the server answered 500, 502 or 503, not where it ran
    into the limit: the same work would run into it again. Completions that are drawn twice harm nothing.
    Longest wait of one call, where every attempt fails at the last moment: (retries + 1) * `timeout` + backoff * (2^retries - 1)
    seconds; of one that is never answered: `timeout`.
    """
    from requests.adapters import HTTPAdapter
    from urllib3.exceptions import ReadTimeoutError
    from urllib3.util.retry import Retry

    class NotAfterTimeout(Retry):
        def increment(self, *args: Any, **kwargs: Any) -> Any:
            if isinstance(kwargs.get("error"), ReadTimeoutError):
                raise kwargs["error"]
            return super().increment(*args, **kwargs)

    class BoundedAdapter(HTTPAdapter):  # type: ignore[misc]
        def send(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("timeout") is None:
                kwargs["timeout"] = (min(timeout, CONNECT_TIMEOUT), timeout)
            return super().send(request, *args, **kwargs)

    policy = NotAfterTimeout(
        total=retries,
        connect=retries,
        read=retries,
        status=retries,
        status_forcelist=[500, 502, 503],
        backoff_factor=backoff,
        raise_on_status=False,  # the last answer says more than "too many 500 error responses"
        allowed_methods=["GET", "POST"],
    )
    adapter = BoundedAdapter(max_retries=policy, pool_maxsize=64)
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    return session


@contextmanager
def server_errors(base_url: str, token: str | None = None) -> Iterator[None]:
    """Turn what a request fails with for good into ServerGone, whose message says what to do."""
    import requests

    start = time.monotonic()
    try:
        yield
    except (
        requests.exceptions.ConnectionError,
        requests.exceptions.ChunkedEncodingError,  # it went in the middle of its answer
        requests.exceptions.RetryError,
        requests.exceptions.Timeout,
    ) as error:
        state = "answers /health" if answers(f"{base_url}/health", token=token) else "does not answer /health"
        limit = f" ({LIMITS})" if isinstance(error, requests.exceptions.ReadTimeout) else ""
        raise ServerGone(
            f"the vLLM server at {base_url} failed a request for good after {time.monotonic() - start:.0f} s with all "
            f"retries ({type(error).__name__}: {error}); it {state}{limit}"
        ) from error


@contextmanager
def read_as_vllms(base_url: str) -> Iterator[None]:
    """Inside the block answers are read; `ServerGone` for one that is not of the form of vLLM's."""
    try:
        yield
    except (json.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError) as odd:
        raise ServerGone(
            f"what answers at {base_url} is no vLLM server, or one of another release ({type(odd).__name__}: {odd}): look at which "
            "program listens at that port"
        ) from odd


def post_json(session: Any, base_url: str, path: str, body: Mapping[str, Any]) -> Any:
    """POST JSON -> parsed JSON answer; ServerGone for an answer that is none."""
    with server_errors(base_url, token_of(session)):
        response = session.post(f"{base_url}{path}", json=dict(body))
    if response.status_code != 200:
        raise ServerGone(f"{base_url}{path} answered {response.status_code}: {response.text[:500]}")
    with read_as_vllms(base_url):
        return response.json()
