"""What a step would take on chips that are not here, from their makers' figures."""

from typing import NamedTuple


class Chip(NamedTuple):
    """One accelerator, in its maker's figures; both links count one direction."""

    name: str
    flops: float  # bfloat16 operations a second, dense
    memory: float  # bytes
    bandwidth: float  # bytes a second of that memory
    link: float  # bytes a second that it sends to chips of its group
    group: int  # chips that are joined so: a pod, or one box
    network: float  # bytes a second that it sends out of the group
    per_cycle: int = 0  # bfloat16 operations a cycle of a TPU

    @property
    def clock(self) -> float:
        """Cycles a second of a TPU."""
        return self.flops / self.per_cycle

    def seconds(
        self, devices: int, *, flops: float, touched: float, sent: float
    ) -> tuple[float, float, float]:
        """The least time of a step's compute, memory traffic and network.

        Each part alone, at its maker's figure: they overlap, and the step takes between
        the longest and their sum.

        Args:
            devices: of this kind.
            flops: of the whole step, over all devices.
            touched: bytes of memory that each device reads or writes.
            sent: bytes that each device sends.
        """
        compute, memory = flops / devices / self.flops, touched / self.bandwidth
        return compute, memory, sent / self.speed(devices)

    def speed(self, devices: int) -> float:
        """Bytes a second that each of so many chips sends. In more than a group has,
        all of them are taken to go over the network: rings cross the group's border."""
        return self.link if devices <= self.group else self.network


# TPU: docs.cloud.google.com/tpu/docs/v5e, /v5p and /v6e, read in 2026; interconnect
# there in both directions, 400, 1200 and 800 GB/s, and the data centre network 6.4
# Tbit/s a pod of v5e, 25.6 Tbit/s a pod of v6e and 50 Gbit/s a chip of v5p. Operations
# a cycle: the compiler's estimate of a 4096³ product is 1.04 to 1.15 of that.
# GPU: nvidia.com/data-center/h100 and /h200, the SXM forms, without sparsity; NVLink
# there in both directions, 900 GB/s. DGX H100 and H200: eight ports of 400 Gbit/s.
CHIPS = (
    Chip("TPU v5e", 197e12, 16e9, 819e9, 200e9, 256, 3.125e9, 2**17),
    Chip("TPU v5p", 459e12, 95e9, 2765e9, 600e9, 8960, 6.25e9, 2**18),
    Chip("TPU v6e", 918e12, 32e9, 1640e9, 400e9, 256, 12.5e9, 2**19),
    Chip("H100", 989e12, 80e9, 3.35e12, 450e9, 8, 50e9),
    Chip("H200", 989e12, 141e9, 4.8e12, 450e9, 8, 50e9),
)


# How jax names the kinds of devices of CHIPS that it does not call as we do.
KINDS = {"TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e"}


def known(kind: str) -> Chip | None:
    """The chip that a jax device says it is (`device.device_kind`), if it is here."""
    kind = KINDS.get(kind, kind)
    return next((x for x in CHIPS if x.name in kind.removeprefix("NVIDIA ")), None)
