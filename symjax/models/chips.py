"""Accelerators with their makers' figures, and the least time of a step on them."""

from typing import NamedTuple


class Chip(NamedTuple):
    """One accelerator with its maker's figures.

    `link` and `network` count one direction.
    """

    name: str
    flops: float  # dense bfloat16 operations per second
    memory: float  # bytes
    bandwidth: float  # bytes per second of that memory
    link: float  # bytes per second sent to chips of the same group
    group: int  # chips with such links: a pod, or one box
    network: float  # bytes per second that a chip sends out of the group
    per_cycle: int = 0  # bfloat16 operations per cycle, of a TPU

    @property
    def clock(self) -> float:
        """Cycles per second of a TPU."""
        return self.flops / self.per_cycle

    def seconds(
        self, devices: int, *, flops: float, touched: float, sent: float
    ) -> tuple[float, float, float]:
        """Return the least seconds of a step's compute, memory traffic and network.

        Each is computed alone, at the speed that the maker states. They may overlap, so
        the step takes at least the longest of the three, and at these speeds at most
        their sum.

        Args:
            devices: number of chips of this kind.
            flops: operations of the whole step, over all devices.
            touched: bytes of memory that each device reads or writes.
            sent: bytes that each device sends.
        """
        compute, memory = flops / devices / self.flops, touched / self.bandwidth
        return compute, memory, sent / self.speed(devices)

    def speed(self, devices: int) -> float:
        """Return the bytes per second that each of `devices` chips sends.

        If they do not fit one group, all bytes count as network traffic, since rings
        cross the border of the group.
        """
        return self.link if devices <= self.group else self.network


# TPU: docs.cloud.google.com/tpu/docs/v5e, /v5p and /v6e, read in 2026. They give the
# interconnect in both directions, 400, 1200 and 800 GB/s, and a data centre network of
# 6.4 Tbit/s per pod of v5e, 25.6 Tbit/s per pod of v6e and 50 Gbit/s per chip of v5p.
# Operations per cycle: the compiler's estimate of a 4096³ product takes 1.04 to 1.15
# times as many cycles as these figures.
# GPU: nvidia.com/data-center/h100 and /h200, SXM, without sparsity. They give NVLink in
# both directions, 900 GB/s. DGX H100 and H200: eight ports of 400 Gbit/s.
CHIPS = (
    Chip("TPU v5e", 197e12, 16e9, 819e9, 200e9, 256, 3.125e9, 2**17),
    Chip("TPU v5p", 459e12, 95e9, 2765e9, 600e9, 8960, 6.25e9, 2**18),
    Chip("TPU v6e", 918e12, 32e9, 1640e9, 400e9, 256, 12.5e9, 2**19),
    Chip("H100", 989e12, 80e9, 3.35e12, 450e9, 8, 50e9),
    Chip("H200", 989e12, 141e9, 4.8e12, 450e9, 8, 50e9),
)


# `device.device_kind` of jax → name in CHIPS, where they differ.
KINDS = {"TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e"}


def chip_of(kind: str) -> Chip | None:
    """Return the chip of a `device.device_kind` of jax, None if it is not in CHIPS."""
    kind = KINDS.get(kind, kind)
    return next((x for x in CHIPS if x.name in kind.removeprefix("NVIDIA ")), None)
