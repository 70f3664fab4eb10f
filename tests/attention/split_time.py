"""The law that recurrences compute the same if devices split time."""

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from laws import close


def check_split_time(form, arrays, weigh, devices, options):
    """Compare output and gradients on a time axis over devices with one device.

    Args:
        form: (*arrays, **options) → output [B T N V], with chunk_size and axis_name.
        weigh: factors of the output in the loss.
        options: mask and segment_ids.
    """
    time = P(None, "time")
    mesh = jax.make_mesh(
        (devices,),
        ("time",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:devices],
    )
    split = jax.shard_map(
        lambda arrays, mask, ids: form(
            *arrays, mask=mask, chunk_size=3, segment_ids=ids, axis_name="time"
        ),
        mesh=mesh,
        in_specs=(time, P(None, None, None, "time"), time),
        out_specs=time,
    )

    def graded(form):
        return jax.jit(jax.value_and_grad(lambda x: (form(x) * weigh).sum()))(arrays)

    found = graded(lambda x: split(x, options["mask"], options["segment_ids"]))
    wanted = graded(lambda x: form(*x, **options))
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        close(one, np.asarray(two), 1e-5)
