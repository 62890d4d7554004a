"""Harvests on the Hugging Face hub: a dataset repository holds the files of a harvest and a card,
so that `datasets` loads it, too."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from data_gen.statistics import summary
from data_gen.storage.chunks import MANIFEST
from data_gen.storage.dataset import CARD, RECORDS, WRITTEN, Harvest
from data_gen.storage.shards import SCHEMAS
from predictors.hub import REFUSALS, refuse_no_repository, said_by
from runtime.errors import UserError
from runtime.json_files import write_checksummed
from runtime.private import Cleaner


def cleaned(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan or manifest without paths of this machine and keys. Raises UserError where its
    records rest on some."""
    clean: dict[str, Any] = Cleaner(facts).value(facts)
    if "chat_template" in facts:  # of the model; its tags look like paths
        clean["chat_template"] = facts["chat_template"]
    for name in facts.keys() - {*WRITTEN, "checksum"}:
        if clean.get(name) != facts[name]:
            raise UserError(
                f"push: {name} of the harvest holds a path of this machine or a key, which is not"
                " sent. Harvest with a name that is none, such as pair.name=mine"
            )
    return clean


def push(harvest: Harvest, repository: str) -> str:
    """Upload a harvest to the repository, which is made, private, if need be; return its address.

    Raises UserError for what must not be sent (`cleaned`), and if the hub refuses."""
    refuse_no_repository(repository, "push")
    manifest, api = cleaned(harvest.manifest.written), HfApi()
    try:
        address = api.create_repo(repository, repo_type="dataset", private=True, exist_ok=True)
        there = set(api.list_repo_files(repository, repo_type="dataset")) - {".gitattributes", CARD}
        if there and MANIFEST not in there:
            raise UserError(f"push: {repository} holds something else. Name another repository")
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            write_checksummed(folder / MANIFEST, manifest)
            (folder / CARD).write_text(card(harvest), encoding="utf-8")
            # the manifest last: it makes a harvest of the other files
            for source, names in ((harvest.folder, RECORDS), (folder, [MANIFEST, CARD])):
                api.upload_folder(
                    repo_id=repository,
                    repo_type="dataset",
                    folder_path=source,
                    allow_patterns=names,
                    delete_patterns=names,  # of an earlier harvest
                    commit_message=f"A harvest of {harvest.pair.name}",
                )
    except REFUSALS as error:
        raise UserError(
            f"push: {repository} was not written ({said_by(error)}). Check the name and"
            " `hf auth login`, and run the same command again"
        ) from error
    return str(address)


def card(harvest: Harvest) -> str:
    """Return the dataset card: how `datasets` reads each kind of record, and the statistics."""
    configs = "\n".join(
        f"- config_name: {kind}\n  data_files: {kind}-*.parquet" for kind in SCHEMAS
    )
    return f"""---
tags: [speculative-decoding, draftpredict]
configs:
{configs}
---
# What {harvest.pair.name} did on {harvest.manifest.prompts.count:,} prompts

Responses of the target, and what the draft says at positions of them: a harvest of draftpredict.
Train a predictor on it with `python train.py predictor=specdecpp data=hub:owner/name`, or read it
with `datasets.load_dataset("owner/name", "rounds")`.

```
{summary(harvest.manifest)}
```
"""
