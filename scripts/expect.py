"""Expected acceptance: methods compared in the same contexts, with no coin.

    python scripts/expect.py data=data/rounds
    python scripts/expect.py methods=[rrsw,rrs,spechub] against=rrsw positions=8
    python scripts/expect.py methods=[block,token] positions=16 draws=4

A context is the beginning of a response that a harvest holds. There every method draws a draft, the
target is run on it once, and the distribution of the verdict gives the expected accepted length
exactly. All methods see the same contexts and the same random numbers, so that differences need far
fewer prompts than counted decodes do. A method whose draft reads earlier rounds begins afresh in
every context. Only engine=serial has such drafts. Writes expected.json and table.md to `out`. An
interrupted run goes on when started again."""

from collections.abc import Mapping
from typing import Annotated, Any

from omegaconf import DictConfig

from decoding.settings import Pair
from runtime.cli import program
from runtime.files import checked_folder, only_writer, refuse_foreign, replaced_folder
from runtime.json_files import write_checksummed
from runtime.settings.groups import AnySplit, DraftWarp, Limit, SomeNames, Splits, Warp, among
from runtime.settings.kinds import Count, Group, Output, Part, Path, Seed, Text


class Method(Group):
    """What drafts and verifies."""

    engine: Annotated[Part, "runs both models: serial"]
    structure: Annotated[Part | None, "which draws a draft consists of"]
    verifier: Annotated[Part | None, "accepts or rejects them"]
    stop: Annotated[Part | None, "when drafting ends"]


class Expect(Group):
    pair: Pair
    warp: Warp
    draft_warp: DraftWarp
    structure: Annotated[Part, "of the method `custom`: which draws a draft consists of"]
    verifier: Annotated[Part, "of the method `custom`: accepts or rejects them"]
    stop: Annotated[Part, "of the method `custom`: when drafting ends"]
    engine: Annotated[Part, "of the method `custom`: runs both models"]
    method: Annotated[dict[str, Method], "what there is to compare, by name"]
    methods: Annotated[SomeNames, "keys of `method` to compare"]
    against: Annotated[Text | None, "the one the others differ from; null: the first of `methods`"]
    data: Annotated[Path, "harvest whose responses the contexts are of, with the pair's tokenizer"]
    split: Annotated[AnySplit, "its prompts that are taken"]
    splits: Splits
    prompts: Limit
    positions: Annotated[Count, "contexts of a response, evenly spread"]
    draws: Annotated[Count, "drafts of a method in a context"]
    seed: Annotated[Seed, "of the drafts"]
    out: Annotated[Output, "folder of expected.json and table.md"]

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        found = dict(among("methods", values["methods"], values["method"]))
        if values["against"] not in (None, *values["methods"]):
            found["against"] = f"null or one of methods: {', '.join(values['methods'])}"
        return found


@program(__file__, Expect)
def main(cfg: DictConfig) -> None:
    """Harvest and pair in, a table out."""
    from data_gen.storage.dataset import Harvest
    from decoding.models.loading import load_pair
    from evaluation.evaluate import run_facts
    from evaluation.expect import (
        MARKER,
        depends_on,
        figures,
        listed,
        page,
        recorded,
        refuse_other_tokenizer,
        serial,
        walked,
    )
    from evaluation.expected import Expected, measured
    from evaluation.journal import Journal, journal_path
    from evaluation.methods import Method, configured
    from evaluation.table import FILE, save

    out = checked_folder("out", cfg.out)
    refuse_foreign(out, MARKER)
    harvest = Harvest.open(cfg.data)
    texts = recorded(cfg, harvest)
    pair = load_pair(cfg.pair)
    refuse_other_tokenizer(pair, harvest)
    methods = {name: Method(name, configured(cfg, name)) for name in cfg.methods}
    engines = {name: serial(cfg, method, pair) for name, method in methods.items()}
    path = journal_path(out, depends_on(cfg, pair, methods, harvest, texts))
    with only_writer(out), Journal(path, Expected) as journal:
        if journal.resumed:
            print(f"going on after {journal.resumed} contexts ({path})")
        turns = walked(cfg, engines, pair, texts, journal)
        measurements = measured(turns)
        found = figures(cfg, measurements)
        facts = {
            "methods": {name: method.to_dict() for name, method in methods.items()},
            "data": {"folder": str(cfg.data), "identity": harvest.identity},
            "run": run_facts(cfg, pair, "scripts/expect.py"),
            "contexts": listed(turns),
        }
        text = page(cfg, found, turns, harvest)
        with replaced_folder(out, MARKER) as folder:
            write_checksummed(folder / MARKER, {**facts, "expected": found})
            save(measurements, folder / FILE)
            (folder / "table.md").write_text(text + "\n", encoding="utf-8")
        journal.remove()
    print(f"\n{text}\n\nsaved in {cfg.out}")


if __name__ == "__main__":
    main()
