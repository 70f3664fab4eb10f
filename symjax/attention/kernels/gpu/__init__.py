"""Kernels for NVIDIA GPUs, and the adapters that call them.

Softmax and differential attention:

cudnn.py                   adapter of cuDNN
differential.py            adapter of the kernels for differential attention on Hopper
differential_forward.py    its forward kernel
differential_gradients.py  its backward kernel
gradient_program.py        one program of the backward kernel
hopper.py                  what both kernels share

Recurrences:

recurrent.py         adapters of the kernels below, and their derivative
chunks.py            blocks, products and the pass over states with decays
gated.py             a decay for each head
gated_channels.py    a decay for each channel
delta.py             the delta rule
delta_gradients.py   its gradients, all chunks in parallel
features.py          linear attention over features: Performer, linear, cosine
feature_operands.py  its operands, segments and feature maps
states.py            its passes over states
jla.py               adapter of the package jax-linear-attention
"""
