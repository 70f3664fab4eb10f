"""Recurrences: mechanisms that read tokens into a state of fixed size.

In the order of reading:

recurrence.py     the protocol: what a mechanism with a state implements
engine.py         causal form and one-token step of every `Recurrence`
chunks.py         tokens laid out in spans and chunks, hidden tokens and segments
schedule.py       chunks in turn or in parallel, and time split over devices
normalised.py     linear attention with a denominator: linear, cosine, Performer
linear_state.py   the sums of linear attention, and rows read from them
cancellation.py   rows read from a state whose features cancel
bidirectional.py  linear attention of encoders: queries see all keys
decays.py         products of decays inside a chunk: decay_causal and the delta rule
decay_blocks.py   sums of log-decays in blocks of a chunk, scores by channel
power_series.py   power series of the matrix QQᵀ of every prefix
ridge.py          ridge regression: the Mesa layer, resolvents of QQᵀ
triangular.py     triangular systems and factors of the tokens of a chunk
flash_groups.py   the engine of FLASH
arguments.py      checks of tokens and states
"""
