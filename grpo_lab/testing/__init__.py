"""Shipped for teams: small real models and tokenizers for tests of their own training code."""

from grpo_lab.testing.models import tiny_model
from grpo_lab.testing.tokenizer import tiny_tokenizer

__all__ = ["tiny_model", "tiny_tokenizer"]
