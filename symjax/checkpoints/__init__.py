"""Checkpoints on disk: saved in the background, checked when they are restored.

checkpoint.py  `Checkpoints`: save in the background, check and restore
record.py      one checkpoint on disk: its format, and its checks
checksum.py    checksums of arrays, equal on every mesh
manager.py     Orbax's manager: which steps to keep, and failed saves
"""
