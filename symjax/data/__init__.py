"""Text in, windows of tokens out: sources, tokenizers, packed corpora, batches."""
