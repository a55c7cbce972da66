"""The sections of ``scripts/gpu_check.py``: each a function ``(Setting) -> rows``, run and reported by ``runner``."""
