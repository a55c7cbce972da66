"""How completions are made, without TRL: samplers, vLLM engine and server, weight sync, proof, thinking budget."""
