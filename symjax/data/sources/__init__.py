"""Sources of text and of labelled examples: files, folders and data sets of the hub.

    table.py            the sources: the keys that each reads, `load`, `files`
    texts.py            `Texts`: the documents of a source, read piece by piece
    splits.py           which documents are held out, by a hash of their content
    local_files.py      stdlib, packages, and the files of `data.path`
    hub.py              data sets of the Hugging Face hub, and folders in its formats
    mixture.py          several sources in one corpus, each with a share of the rows
    labelled_sources.py texts and images with labels

`hub.py` uses these files, and the other sources use some of them:

    opening.py          opens a data set, and turns errors into one line
    builders.py         reads only the configured columns, and names a damaged file
    columns.py          the configured columns, and errors about unknown ones
    csv_tables.py       tables of these columns of CSV files
    json_tables.py      tables of these columns of JSON files
    formats.py          formats by the endings of files, and folders that mix them
    saved_datasets.py   folders that `Dataset.save_to_disk` wrote
    json_rows.py        rows of JSON files
    zstd.py             a check that zstd files are whole
    errors.py           errors that name the file and the line
    left_out.py         counts of rows and files that are not read

To add a source of text named "mine":

1.  Write a function that returns a `texts.Texts`. This holds a function that reads all
    documents, True for each document that is held out, and the number of characters.
    `local_files.text_files` is an example. `splits.held_out_by_content` chooses the
    held-out documents.
2.  Call it in `table.load`. Let `table.files` return the files that it reads: a corpus
    is packed again if their names, sizes or times change.
3.  Add "mine" to `table.KEYS`, with the keys of `data.` that it reads, and to the
    choices of `data.source` in `symjax/config/data.py`.
4.  Test it in `tests/data/test_sources.py`, and describe it in `docs/data.md`.

Tokenizing, packing, caching and batches need no change.
"""
