"""How completions are made: the sampler, the vLLM engine and server, weight sync and its proof, the thinking budget.

Every module here is free of TRL (the trainer room hooks them in) and loads torch or vLLM only where it needs them.
"""
