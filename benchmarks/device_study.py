"""The Shakespeare study of device.py: several small models train at a time."""

import json
from pathlib import Path
from typing import Any

from device_rows import Row, Sizes
from trainings import ROOT, train_together

from symjax.programs import compare

COLUMNS = ("gpt", "sym", "diff", "diff_sym", "norm_sym")


def study(row: Row, sizes: Sizes, seconds: float) -> dict[str, Any]:
    """Train all COLUMNS at one depth, and return their held-out losses over the seeds.

    The subject of a row is a preset, and a peak learning rate after " at " unless it is
    the preset's own. A rate falls to a tenth in the end, as in the study.

    Each run is a process; `together` of them run at a time, seed by seed. Runs that do
    not end in time are saved, and the result is a fault until the same command has
    completed them.
    """
    data = ("data.source=text", f"data.path={sizes.text}", "data.tokenizer=char")
    preset, _, rate = row.subject.partition(" at ")
    keys = (*data, *sizes.study, f"steps={sizes.steps}")
    if rate:
        keys += (f"optimizer.learning_rate={rate}",)
    words = [f"--config.{x}" for x in keys]
    files = [f"{ROOT / 'configs' / x}.py:{preset}" for x in COLUMNS]
    out = Path(sizes.out, rate)
    runs = {
        out / f"{column}-{preset}-seed{seed}": ["--config", file, *words]
        + [f"--config.seed={seed}"]
        for seed in map(int, sizes.seeds.split(","))
        for column, file in zip(COLUMNS, files, strict=True)
    }
    left = train_together(runs, sizes.together, seconds)
    if left:
        return {"fault": f"{len(runs) - len(left)} of {len(runs)} runs are complete"}
    arguments = ["--configs", ",".join(files), "--seeds", sizes.seeds, *words]
    compare.main([*arguments, "--out", str(out)])
    found = json.loads((out / "compare.json").read_text(encoding="utf-8"))["compare"]
    loss = f"held-out ({found['unit']})"
    return {f"{x['configuration']}_heldout": x[loss] for x in found["configurations"]}
