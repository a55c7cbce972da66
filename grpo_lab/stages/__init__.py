"""Stages, the steps of commands and pipelines: they sample, filter, select, train, merge and evaluate."""
