"""Rows of generated tasks and of padded texts: tokens, and a target at each place.

Rows of packed text are in `batches.py`.
"""

import numpy as np

NOTHING = -1  # the target of a place without target, and the id of padding tokens

Rows = tuple[np.ndarray, np.ndarray]  # tokens and targets, int32 [B, length]
