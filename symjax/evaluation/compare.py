"""Alias: `python -m symjax.evaluation.compare` runs symjax.programs.compare."""

import runpy

if __name__ == "__main__":
    runpy.run_module("symjax.programs.compare", run_name="__main__")
