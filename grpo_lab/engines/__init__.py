"""Engines that make completions, without TRL: generators, vLLM engine and server, weight sync, proof, thinking
budget."""
