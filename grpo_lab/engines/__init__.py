"""Engines that make completions, without TRL: samplers, vLLM engine and server, weight sync, proof, thinking budget."""
