"""Rows of ``scripts/agree_with_origins.py``: each file brings ``ROWS``, parts beside the code that they come from."""
