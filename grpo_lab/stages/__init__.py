"""What commands and pipelines are lists of: stages that sample, filter, select, train, merge and evaluate."""
