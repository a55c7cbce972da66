"""vLLM: the engine in this process, and the server."""
