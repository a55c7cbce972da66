"""What pipelines are lists of: stages that sample, filter, select, train and merge."""
