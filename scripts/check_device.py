"""Check a GPU: does it decode and harvest as the host does, and how fast?

    python scripts/check_device.py                     # the first GPU, the embedded pair
    python scripts/check_device.py pair=smollm2        # an ordinary draft: side by side as well
    python scripts/check_device.py device=cuda:1 second=cuda:0
    python scripts/check_device.py memory=[1024,8192] pair=smollm2    # what it would take; no GPU

In float32 every engine and a harvest run on the host and on the device with the same seeds; near
ties are listed. Then tokens per second of `generate`, plain and speculative decoding and the
harvest, in the pair's own dtype, time outside forwards and peak memory. A second GPU is used where
there is one; what the machine lacks is skipped by name. Writes device.json and device.md to `out`
and ends with exit code 2 where the device differs."""

import sys
from typing import Annotated

from decoding.settings import DeviceName, Pair
from runtime.cli import program
from runtime.errors import UserError
from runtime.files import checked_folder, refuse_foreign
from runtime.job import command_line
from runtime.settings.groups import Dataset, DraftWarp, Harvest, Warp
from runtime.settings.kinds import Count, Counts, Group, Output


class CheckDevice(Group):
    pair: Pair
    dataset: Dataset
    warp: Warp
    draft_warp: DraftWarp
    device: Annotated[DeviceName | None, "to check; null: the first GPU"]
    second: Annotated[DeviceName | None, "for the draft; null: another GPU, if there is one"]
    max_new_tokens: Annotated[Count, "of a decode"]
    repeats: Annotated[Count, "of everything that is timed, after one that is not"]
    harvest: Harvest
    memory: Annotated[
        Counts | None,
        "instead, print the memory that a decode and a harvest take after prompts of so many"
        " tokens, from the models' config.json alone",
    ]
    out: Annotated[Output, "folder of device.json and device.md"]


@program(__file__, CheckDevice)
def main(asked: CheckDevice) -> None:
    """Write `out`/device.json and device.md, or print how much memory is needed. Raises UserError
    where there is no such device, or where it differs from the host."""
    import torch

    from data_gen.settings import HarvestSettings
    from decoding.models.options import first_line
    from evaluation.device import check

    cfg = asked.composed
    if cfg.memory is not None:
        return check.needed(cfg)
    out = checked_folder("out", cfg.out)
    refuse_foreign(out, check.NAME)
    device, second = check.chosen(cfg.device, cfg.second)
    settings = HarvestSettings.of(cfg.harvest, cfg, stride=1)
    requests, equal = check.compared(cfg, settings, device, second)
    found = {
        "device": check.named(device),
        "command": command_line(),
        "setup": {},
        "agreement": equal,
        "speeds": {},
        "memory": {},
        "skipped": [check.UNTIMED],
        "verdict": check.verdict(equal),
    }
    check.report(out, found)
    print(f"{found['verdict']} Saved {out / check.PAGE}. Speeds follow", file=sys.stderr)
    try:
        check.measure(found, requests, settings, cfg, (device, second))
    except torch.OutOfMemoryError as error:
        remedy = "Lower harvest.batch_size or take a smaller pair"
        raise UserError(f"harvest.batch_size: {first_line(error)}. {remedy}") from error
    print(f"\n{check.report(out, found)}\nsaved {out / check.NAME} and {out / check.PAGE}")
    if any(each["faults"] for each in equal.values()):
        raise UserError(
            f"device: it differs from the host. See {out / check.PAGE}, and attach both files to a"
            " report"
        )


if __name__ == "__main__":
    main()
