"""Talk with a vLLM server that ends: waiting until it is up, requests with a time limit, and what they fail with.

TRL's client has retries but no time limit: a server that hangs, hangs the run. `bound_session` adds the limit;
`server_errors` turns what is left after the retries into `ServerGone`, for the trainer to save a checkpoint on.
"""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONNECT_TIMEOUT = 10.0
LIMITS = "limit: `rollout.server.request_timeout`, and `silence_timeout` for all but generations"


class ServerGone(ConnectionError):
    """The server did not come up in time, or no longer answers."""


def answers(url: str, timeout: float = 5.0) -> bool:
    """True where a GET of `url` is answered with status 200 in time."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def wait_until_ready(
    base_url: str, timeout: float, *, process: subprocess.Popen[bytes] | None = None, log: Path | None = None
) -> float:
    """Wait for `GET /health` -> seconds waited. ServerGone after `timeout` seconds, or at once where `process` ended."""
    start = time.monotonic()
    while not answers(f"{base_url}/health"):
        if process is not None and process.poll() is not None:
            raise ServerGone(f"the vLLM server ended with status {process.returncode} before it was up.{log_tail(log)}")
        if time.monotonic() - start > timeout:
            raise ServerGone(
                f"no vLLM server at {base_url} within {timeout:.0f} s (setting vllm_server_timeout). Start one with "
                f"`grpo-lab serve`, or look at why it does not come up.{log_tail(log)}"
            )
        time.sleep(0.5)
    return time.monotonic() - start


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
def server_errors(base_url: str) -> Iterator[None]:
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
        state = "answers /health" if answers(f"{base_url}/health") else "does not answer /health"
        limit = f" ({LIMITS})" if isinstance(error, requests.exceptions.ReadTimeout) else ""
        raise ServerGone(
            f"the vLLM server at {base_url} failed a request for good after {time.monotonic() - start:.0f} s with all "
            f"retries ({type(error).__name__}: {error}); it {state}{limit}"
        ) from error


def post_json(session: Any, base_url: str, path: str, body: Mapping[str, Any]) -> Any:
    """POST JSON -> parsed JSON answer; ServerGone for an answer that is none."""
    with server_errors(base_url):
        response = session.post(f"{base_url}{path}", json=dict(body))
    if response.status_code != 200:
        raise ServerGone(f"{base_url}{path} answered {response.status_code}: {response.text[:500]}")
    return response.json()
