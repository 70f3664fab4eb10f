"""Evaluation of a checkpoint: the tasks of `eval.py`, and the forms of their results.

`python eval.py --workdir RUN --tasks noise,rank` runs `programs/evaluate.py`, which
loads the checkpoint once, runs one task after another, prints the results and writes
the files that flags name:

    loading.py        load(workdir) → LoadedRun: the model with its configuration and
                      its examples
    tasks.py          TASKS: the name of each task and the function that measures it
    measures/         the functions of the tasks, listed in `measures/__init__.py`
    results.py        Options (the flags of eval.py that tasks read), and Result (what a
                      task returns: values for JSON, lines of text, tables, figures)
    headlines.py      the few numbers of a task that a comparison of runs shows
    report.py         a Result as printed text, JSON, CSV, PNG or HTML
    overview.py       the first part of the HTML page: run, configuration, data, loss
    harness_model.py  a symjax model in the interface of EleutherAI's lm_eval
    compare.py, harness.py   older names of programs that are in symjax/programs

A task is a function `(LoadedRun, Options) -> Result`. To add one:

1. write the function in a file of measures/; a measure of attention maps is a function
   of one window and one layer, which `measures/reading.by_layer` calls for every layer
   of a model on a few held-out windows;
2. add its line to `TASKS`, which eval.py, `--list` and `--tasks all` read;
3. add its headline numbers to `headlines.HEADLINES`, or `_none` if it has none;
4. add its row to the table in docs/evaluating.md;
5. test it in tests/evaluation on numbers that are known by hand.
"""
