"""Code that mechanisms and kernels share, such as checks, masks and mesh axes.

arguments.py       checks of arguments, and their messages
options.py         options that a mechanism declares itself
operands.py        the arrays of one call, and its static settings
visibility.py      the keys that a row sees: masks, causality, windows, segments
lengths.py         laws of length: factors of scores by the number of keys
feature_maps.py    feature maps φ of linear attention, and their results
underflow.py       second computation of rows that underflow
products.py        products of matrices with the precision that a mechanism needs
bfloat16_parts.py  float32 numbers as sums of bfloat16 numbers
where.py           choice between two arrays, without a function of its own
devices.py         platforms that the traced program may run on
meshes.py          functions on any mesh and under `jax.vmap`
sequence.py        time split over devices, and segments of time
"""
