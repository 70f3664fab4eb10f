"""The state that a device starts from, where time is split over a mesh axis."""

from typing import Any

import jax

from symjax.attention.chunks import Chunk, hide, stacked, unsegmented
from symjax.attention.recurrence import Stretches
from symjax.attention.shards import segment_state_before
from symjax.attention.side_by_side import before_all


def state_before(
    recurrence: Stretches,
    parameters: Any,
    chunk: Chunk,
    chunk_size: int,
    axis_name: str,
) -> Any:
    """What earlier devices' stretches leave of the segment a device goes on with."""
    segment = chunk.segment
    if segment is not None:
        chunk = hide(chunk, segment == segment[:, -1:])
    chunks = stacked(unsegmented(chunk), chunk_size)
    nothing = before_all(recurrence, parameters, None, chunks)

    def body(stretch: Any, chunk: Chunk) -> tuple[Any, None]:
        return recurrence.merge(stretch, recurrence.stretch(parameters, chunk)), None

    own, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), nothing, chunks)
    state, _ = segment_state_before(recurrence.merge, own, nothing, segment, axis_name)
    return state
