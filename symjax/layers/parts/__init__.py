"""Parts that mechanisms add to a layer: weights, operands, sharding, cost.

part.py      Part, the declaration; Sizes of a layer; FLOPs of attention
table.py     PARTS: mechanism → Part
decays.py    log-decays (RetNet, GLA, Mamba-2, …)
delta.py     β and decay of the delta rule
features.py  learned feature maps, random projections
functions.py scale of functions of QQᵀ; ridge of the Mesa layer
scores.py    score mechanisms: forget gates, sinks, factors that depend on the length
"""
