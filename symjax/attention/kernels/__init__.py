"""Kernels for TPUs and NVIDIA GPUs, and the dispatch of calls to them.

dispatch.py   the table of kernels, and the choice for a call
operands.py   arrays and shapes that the kernels of all platforms share
intervals.py  intervals of keys that rows see, and the blocks to visit
gpu/, tpu/    the kernels, and the adapters that dispatch calls
"""
