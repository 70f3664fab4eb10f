"""Alias: `python -m symjax.evaluation.harness` runs symjax.programs.harness."""

import runpy

if __name__ == "__main__":
    runpy.run_module("symjax.programs.harness", run_name="__main__")
