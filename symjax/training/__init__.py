"""Training runs: from a configuration to a trained model.

loop.py       a run, from its configuration to its last checkpoint
context.py    what a run has besides its weights
workdir.py    the folder of a run, locked while it runs
preflight.py  configuration and data against the checkpoints
initial.py    the first state: from a checkpoint, from other weights, or new
step.py       training and evaluation steps for one model and one mesh
loss.py       the loss of every token
transfer.py   attention transfer: the first steps of a conversion
optimizer.py  update rules, weight decay, average of weights, guard
schedule.py   the learning rate of each step
sharding.py   meshes, and the sharding of weights and batches
compile.py    compilation of the step, and the memory that it needs
prefetch.py   the next batch, made while a step runs
heldout.py    loss on held-out examples, statistics of layers, a sample
messages.py   what a run prints before its first and after its last step
saved.py      a checkpoint as a model, without the data of its training
"""
