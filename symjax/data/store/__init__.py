"""Packed corpora on disk: written once, read piece by piece, or streamed."""
