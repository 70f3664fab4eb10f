"""Texts, labelled examples and generated tasks, and the batches of a run.

    examples.py   `open_examples`: the entry; a run gets all its rows from `Examples`
    corpus.py     text → token ids in a folder, packed once: `open_corpus`, `Corpus`
    batches.py    the rows of batches, windows of the packed text: `Examples`,
                  `training_windows`
    shuffle.py    the window that a row shows, in a new order every epoch
    documents.py  documents in a row: `with_segment_ids`
    boundaries.py the tokens that packing writes between documents
    sources/      where text comes from, and how to add a source (see its docstring)
    store/        packed token ids on disk: written, cached, read, streamed
    tokens.py     byte and character tokenizers; subwords.py: `tokenizer.json` and BPE,
                  with post_processing.py
    labelled.py   texts or images with one label each
    generated.py  tasks with known answers: recall, needles, ListOps, the tasks of
                  rearranged.py (copying, sorting …) and of samples.py (majorities);
                  draws.py: their random numbers; rows.py: the type of their rows
    ngrams.py     n-gram baselines; text_statistics.py: held-out targets and their bytes
    delimiters.py the tokens before and after a document, for prompts of a model
    given.py      the text of `eval.py --text` in place of held-out text
    progress.py   the progress bar of packing

From the packed file to the gradient, in the order of calls:

1.  Before the run, `examples.open_examples` opens `train.npy` and `train_ends.npy` as
    `PackedArray`s and binds them to `training_windows`: this is
    `Examples.read_training`.
2.  `train` in `training/loop.py` makes batches in a thread, one step ahead:
    `Examples.batch_reader(shape, seed=, step=)` returns a function of (start, stop).
3.  `Program.place` (`training/step.py`) calls this function for the rows of each device
    and makes global arrays of the results.
4.  `batches.training_windows` computes one batch. `window_starts` and
    `shuffle.shuffled` turn row numbers into places in the text. `_cut_windows` reads
    length + 1 tokens from each place (`PackedArray.__getitem__`, one `os.pread`); the
    first `length` are inputs, the last `length` targets. `documents.with_segment_ids`
    adds the document of each token if documents are separate.
5.  `train` calls the compiled step with inputs and targets: `Steps.train`
    (`training/step.py`) takes `jax.value_and_grad` of `Steps.loss`, which calls
    `loss.hidden_of` (the model's `hidden`) and `loss.objective`.

A document boundary in a row, if documents are separate (`data.documents`):

-   `store/writer.py` has written a token at the boundary (`boundaries.boundaries`) and
    the place where the document ends (`train_ends.npy`).
-   `documents.with_segment_ids` gives the tokens of each document in the row one id.
    A separator that two documents share is the last target of the first document and
    the first input of the second. If they share none, the last token of a document has
    the target −1.
-   The model hides other documents from each token: attention masks pairs of different
    ids, the states of recurrences start empty in each document, convolutions read zeros
    before it, and its positions begin at 0 (`layers/segments.py`).
-   The loss leaves out targets below 0.

If documents are joined, there are no ids: a token sees all earlier tokens of its row.
"""
