"""Engines that make completions, without TRL: generators, vLLM engine and server, weight sync, thinking budget."""
