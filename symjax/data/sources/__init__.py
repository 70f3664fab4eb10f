"""Sources of text and of labelled examples: files, folders, hub data sets."""
