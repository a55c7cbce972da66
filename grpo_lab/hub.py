"""A quick check whether the Hugging Face hub can be reached: its own clients try for half a minute
before they give up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_SECONDS_TO_CONNECT = 5
_SECONDS_TO_ANSWER = 10


def reach_hub(name: str, kind: str = "model") -> None:
    """Ask the hub once for the ``kind`` (``model`` or ``dataset``) called ``name``, to see whether the hub answers.

    Any answer will do, also that there is no such name: whoever loads ``name`` reports that better.

    Raises:
        ConnectionError: the hub cannot be reached.
    """
    import httpx
    from huggingface_hub import HfApi

    hub = HfApi()
    ask = hub.model_info if kind == "model" else hub.dataset_info
    limits = httpx.Timeout(_SECONDS_TO_ANSWER, connect=_SECONDS_TO_CONNECT)
    try:
        ask(name, timeout=limits)  # type: ignore[arg-type]  # what httpx takes
    except (httpx.NetworkError, httpx.ConnectTimeout, httpx.ProxyError) as error:
        raise ConnectionError(f"{hub.endpoint} cannot be reached: {error}") from error
    except Exception as error:
        log.debug("the hub says of %s: %s", name, error)


@contextmanager
def data_set_reached(name: str) -> Iterator[None]:
    """Context for loading the data set ``name`` of the hub. If the hub cannot be reached, the ``datasets`` library is
    offline inside the block, so that it reads its cache at once.

    Raises:
        ConnectionError: the hub cannot be reached, and the block failed, since the cache lacks the data set.
    """
    from datasets import config

    before = config.HF_HUB_OFFLINE
    away: ConnectionError | None = None
    if not before:
        try:
            reach_hub(name, "dataset")
        except ConnectionError as error:
            away = error
            config.HF_HUB_OFFLINE = True
    try:
        yield
    except Exception as error:
        if away is None:
            raise
        raise away from error
    finally:
        config.HF_HUB_OFFLINE = before
