"""Pallas kernels for TPUs, and the adapters that call them.

Softmax and differential attention:

attention.py           the adapter
attention_gradient.py  both kernels as one function with a derivative
attention_plan.py      operands, their blocks, and the order of blocks
attention_forward.py   the forward kernel
attention_backward.py  the backward kernels

Recurrences:

recurrent.py        the adapters, and the derivative that they share
chunks.py           the template: a pass over chunks forward, and one backward
decays.py           decay factors of a chunk
gated.py            linear attention with decays
delta.py            the delta rule
features.py         Performer and linear attention
feature_weights.py  the features of one chunk

Shared:

tiles.py         tiles, products and column vectors
packed_heads.py  several heads in one tile of 128 lanes
heads.py         rotation and norm of heads without a change of layout
"""
