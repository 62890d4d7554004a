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

from typing import Annotated

from decoding.settings import DeviceName, Pair
from runtime.cli import program
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
def main(settings: CheckDevice) -> None:
    if settings.memory is None:
        from evaluation.device.check import check

        check(settings.composed)
    else:
        from evaluation.device.memory import needed

        print(needed(settings.composed))


if __name__ == "__main__":
    main()
