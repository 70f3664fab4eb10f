"""Packed corpora on disk: written once, read piece by piece, or read while they grow.

    folder.py    opens the corpus of a run: its manifest and its arrays (start here)
    cache.py     the corpora of a machine, one folder each; packs what is missing
    writer.py    appends documents to `train.npy` and `train_ends.npy`
    packed.py    `PackedArray`: reads slices of such a file, and checks the file
    manifest.py  `corpus.json`: tokenizer, counts and hashes
    stream.py    reads a corpus that another process still packs
    packer.py    the program of that process

`<split>.npy` has the token ids of all documents of a split, one after another.
`<split>_ends.npy` has the place after the last token of each document.
"""
