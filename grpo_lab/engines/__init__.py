"""How completions are made: engine, weight sync and its proof, server, thinking budget.

Every module here is free of TRL (the trainer room hooks them in) and loads torch or vLLM only where it needs them:

    engine            options of the vLLM engine, and how it is started in this process
    grouping          rows of a batch -> one request with n = G per prompt
    sync              the trainer's weights into the engine, complete or an error
    engine_tensors    what the engine really multiplies with, read back under the trainer's names
    proof             engine log-probs against trainer log-probs on the engine's own fresh samples
    server            a vLLM server on 127.0.0.1: its command line, start and end
    server_talk       waiting for it, bounded requests, what they fail with
    server_access     who may ask it what: the middleware before all of it
    server_calls      what its workers may be told
    server_token      the token: made, kept, found again
    server_restart    the command that starts it again
    weight_files      weights through shared memory, for machines on which the server has no NCCL
    server_worker     what runs inside the server's worker to load them
    transformers_engine   the same interface on a transformers model
    thinking_budget   cut the thinking, insert the stop text, let the model answer
"""
