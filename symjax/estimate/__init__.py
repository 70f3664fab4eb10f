"""Cost of a run before it starts: the dry run of `train.py --dry_run`.

`plan.describe` compiles the training step of a configuration by a real compiler and
reads memory, traffic and time from the compiled program. The step does not run, and its
arrays are not allocated. The compilers, and the sources of the estimate of time:

    command                   compiler                estimate of time
    --dry_run                 XLA of this machine     speeds that the makers of chips
                                                      state (`models/chips.py`)
    --dry_run --target v5e-N  the TPU compiler        cycles that the compiler writes
      (v5p-N, v6e-N)          (wheel `libtpu`)        on its operations
    --dry_run --target h200-N XLA for NVIDIA GPUs     bytes that the program moves, at
                              (jax's CUDA plugin)     the speed of the memory

Without a target, if the mesh has more devices than the machine, all of them are
simulated on the CPU. A target needs its compiler, but not its chips.

    plan.py         the text of a dry run
    targets.py      the machines of --target and their compilers
    hlo.py          a compiled program, parsed: instructions, loops, sums over a run
    collectives.py  bytes that devices send each other
    tpu_cycles.py   estimated cycles by part of the step, on TPUs
    gpu_bytes.py    bytes read and written by part of the step, on GPUs
"""
