"""Measurements of a model, by subject; in brackets the tasks of eval.py.

Losses and text:
    language       losses on held-out and training text, a sample (loss, sample)
    lengths        loss by position and in longer windows (position, length)
Answers of the generated tasks:
    answers        accuracy by difficulty (mqar, needle, copy, reverse, sort, swap,
                   listops)
    majority       accuracy by the number of samples (sets)
    order          accuracy by the order of the examples in a prompt (order)
Inside the layers. `windows` chooses held-out windows, `reading` computes queries, keys
and maps of every layer, and the others measure them:
    attended       which tokens get the attention (noise, self_share, dilution)
    spread         over how many keys attention spreads (entropy, support)
    ranks          ranks of score matrices and maps (rank)
    spectrum       singular values, similarity of tokens by depth (spectrum)
    chains         maps as Markov chains, a part of the task spectrum
    magnitudes     sizes of scores, hidden states and gradients (outliers, gradients)
    branches       gradients through the branches of differential attention, a part of
                   the task gradients
    maps           pictures of attention maps (maps)
    approximation  feature maps against exact softmax (approximation)
Other properties of the model:
    symmetry       symmetry and direction of W_q W_kᵀ (symmetry)
    weights        λ of differential layers, sizes of heads (lambda, dimension)
    speed          tokens per second and memory against softmax (speed)
"""
