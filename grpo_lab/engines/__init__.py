"""Engines that make completions, without TRL: generators, vLLM engine and server, sync, proof, thinking budget."""
