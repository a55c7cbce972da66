"""Stages, of which commands and pipelines are lists: they sample, filter, select, train, merge and evaluate."""
