"""Make a checkpoint the folder that a hub shows, and put it there.

    python scripts/publish.py checkpoint=checkpoints/hrad
    python scripts/publish.py checkpoint=checkpoints/hrad thresholds=runs/thresholds.json
    python scripts/publish.py checkpoint=checkpoints/hrad repository=me/hrad-for-my-pair

The folder `out` is the checkpoint with a model card that also has a reliability plot and the
thresholds that tune.py chose for it; where files lie on this machine, and keys among the settings,
are left out. With `repository` it is sent to the Hugging Face hub (log in
with `hf auth login`); what is sent is that folder, so look at it first. Loaded by
predictors.hub.from_pretrained and by `predictor=` inside generate."""

from typing import Annotated

from runtime.cli import Program
from runtime.settings.kinds import Group, Output, Path, Text


class Publish(Group):
    checkpoint: Annotated[Path, "folder that train.py has made"]
    thresholds: Annotated[Path | None, "what tune.py has written; null: none in the card"]
    repository: Annotated[Text | None, "owner/name on the hub; null: only the folder is made"]
    private: Annotated[bool, "whether a repository that is made is private"]
    out: Annotated[Output, "the folder as the hub holds it"]


main = Program(__file__, Publish, "programs.serving.publish")

if __name__ == "__main__":
    main()
