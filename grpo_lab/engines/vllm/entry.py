"""What a server's `--middleware` names: `Guard`, behind a reader of HTTP that has limits. Imported in the server's process alone.

uvicorn reads with httptools where that is installed, which takes a header of any length, from whoever connects and before any
token is asked for: one without end fills the memory, and nobody else is answered meanwhile (150 MiB: a minute). vLLM's limit
(4 MiB) is in force with h11 only, so that is what reads here; and it waits for a head for ever, which `server_reader` ends.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`Guard`, for which vLLM asks while it builds its application; uvicorn chooses its reader after that."""
    if name != "Guard":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from uvicorn.protocols.http import auto

    from grpo_lab.engines.vllm.access import Guard
    from grpo_lab.engines.vllm.reader import Reader

    auto.AutoHTTPProtocol = Reader
    return Guard
