"""Metrics, progress and traces of a run.

metrics.py   `metrics.jsonl` of a run
progress.py  the bar or the lines of progress, and the speed
boards.py    TensorBoard and Weights & Biases
curve.py     the loss curve
profile.py   traces of a few steps
mirror.py    copies of these files in a bucket
"""
