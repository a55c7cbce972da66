"""The sections of ``scripts/gpu_check.py``, each a function ``(Setting) -> rows``, and what runs and reports them.

section    what a section is, what it is given, and the rows that it yields
sections   the table of all sections
runner     runs them within the budget, by ``process`` (a section's process as the runner sees it) and ``worker`` (what
           happens inside of it)
record     the results in their file; ``markdown`` makes the page

The other modules are the sections: ``device``, ``parity``, ``sharded``, ``resume``, ``bins``, ``fast_tests``; with vLLM
``engine``, ``overlap``, ``whole_step``; and ``shared_prompts``, ``update`` (``work``: the operations that it needs),
``decoding``, ``quick_start``.
"""
