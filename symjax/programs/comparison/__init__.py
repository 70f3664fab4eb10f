"""The parts of `compare`, which trains, measures and tabulates several runs.

runs.py       the runs: planned from configurations, or existing ones in groups
matched.py    --match: the feed-forward size that gives equal parameters or FLOPs
tuned.py      --tune: the best value of each configuration, and the held-out rows
              on which it is chosen
measured.py   the measurements of one run, with those of its evaluation tasks
paired.py     differences paired by seed, with their interval
tables.py     tables, figures and JSON of all runs
"""
