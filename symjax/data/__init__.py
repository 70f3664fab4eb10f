"""Sources, tokenizers, packed corpora, generated tasks, and the batches of a run."""
