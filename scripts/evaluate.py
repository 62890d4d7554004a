"""Decode real prompts with several methods and compare them: speed, acceptance, losslessness.

    python scripts/evaluate.py
    python scripts/evaluate.py methods=[fixed,confidence] warp=greedy draft_warp.temperature=0
    python scripts/evaluate.py methods=[custom] stop=adaedl verifier=block verbose=true
    python scripts/evaluate.py methods=[custom] engine=lookahead
    python scripts/evaluate.py experiment=generate dataset=jsonl dataset.path=prompts.jsonl
    python scripts/evaluate.py what=expected methods=[rrsw,rrs,spechub] against=rrsw positions=8
    python scripts/evaluate.py what=served requests=[1,2,4,8,16]

Needs the pair (python pairs/build_pair.py) and, for rules and structures that learn, their
checkpoints (python train.py), made with the same warps; grown drafts need measured costs as well
(python scripts/tune.py cost=measure). Uses the thresholds of scripts/tune.py if there are some for
this pair and these warps, unless others are given; other settings are tried on calibration prompts
(`tried`). Writes results.json, table.md, measurements.parquet, the traces of every method, the
texts of their tokens (vocabulary.json) and answers in Spec-Bench's layout (spec_bench) to `out`. An
interrupted run continues when started again.

Prints what to use and how sure that is, then one table; verbose=true prints every table (they are
all in table.md). bound=true adds the speed-up that the draft's acceptance and the costs of forwards
allow.

what=expected compares acceptance in the same contexts, without random verdicts: a context is the
beginning of a response that a harvest holds. There every method draws a draft, the target is run on
it once, and the distribution of the verdict gives the expected accepted length exactly. All methods
use the same contexts and the same random numbers, so that differences need far fewer prompts than
counted decodes do. A method whose draft reads earlier rounds begins afresh in every context. It
works with engine=serial only. Writes expected.json and table.md to `out`.

what=served decodes many prompts at once, in groups, inside vLLM (make vllm), plain, with vLLM's own
methods and with our proposer (python scripts/export.py serving=vllm), and says how many outputs are
the same. With `data`, a greedy harvest of the same prompts, it says what replay expects of every
position of a draft. An interrupted run continues. Writes served.json, table.md and
measurements.parquet to `out`.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from decoding.settings import Pair
from runtime.cli import program
from runtime.compatibility import leaves
from runtime.settings.check import faults
from runtime.settings.groups import (
    AnySplit,
    Dataset,
    Limit,
    Logger,
    Method,
    Methods,
    SomeNames,
    Splits,
    among,
)
from runtime.settings.kinds import (
    Count,
    Distinct,
    Names,
    Output,
    Part,
    Path,
    Positive,
    Says,
    Seed,
    Text,
)

CUSTOM = "custom"  # the method made of the parts on the command line
CostTables = Annotated[
    list[Literal["measured", "pipeline"] | Positive], Distinct,
    Says("a list of measured, pipeline and speed ratios above 0, such as [measured,5]"),
]  # fmt: skip


MODES = Says("decoded, expected or served, as what=expected and in no sweep")
WHAT = (
    "decoded: methods by decoding prompts; expected: by the acceptance to expect along a harvest's"
    " responses; served: inside a serving engine, by requests at once"
)


class Evaluate(Methods):
    what: Annotated[Literal["decoded"], MODES, WHAT]
    pair: Pair
    dataset: Dataset
    logger: Logger
    workers: Annotated[
        Part, "processes that decode; speeds are those of a machine that several share"
    ]
    methods: Annotated[
        Names, "keys of `method` to compare; autoregressive, plain decoding, always runs"
    ]
    tried: Annotated[
        dict[str, Any],
        "settings of a method that are not tuned: of each list, the fastest in a pass over prompts"
        " of the calibration split",
    ]
    tried_prompts: Annotated[Count, "prompts of that pass"]
    thresholds: Annotated[
        Path | None, "file of scripts/tune.py, used where it exists and fits; null: none"
    ]
    split: Annotated[
        AnySplit,
        "prompts no predictor was trained or calibrated on; all: the whole set, but for prompts"
        " that settings were tried on",
    ]
    splits: Splits
    limit: Limit
    max_new_tokens: Annotated[Count, "most tokens of a response"]
    repeats: Annotated[Count, "times that every method decodes every prompt, in turn"]
    batch: Annotated[
        Count,
        "prompts that plain decoding and methods with engine=serial decode at once; the others go"
        " one after another",
    ]
    keep_caches: Annotated[
        bool,
        "a later turn of a conversation begins with the caches of the one before, as in a chat"
        " server (one prompt at a time); false: it is read from its beginning",
    ]
    seed: Annotated[Seed, "of the responses' draws"]
    against: Annotated[
        dict[str, SomeNames],
        "what methods are compared with besides plain decoding: of each list, the fastest",
    ]
    assistant: Annotated[
        Path | None,
        "draft of assisted generation, a folder or hub id; null: pair.assistant, or pair.draft"
        " where there is none",
    ]
    longest_draft: Annotated[
        int, Field(ge=1, le=1000), "with bound=true, tokens of a draft at most"
    ]
    bound: Annotated[
        bool, "the speed-up that the draft's acceptance and the costs of forwards allow, modelled"
    ]
    verbose: Annotated[bool, "print every table: by dataset, drafts, where the time goes"]
    modelled: Annotated[
        CostTables,
        "speed-up on two devices, priced: measured, pipeline (a split target), speed ratios c",
    ]
    out: Annotated[
        Output,
        "folder of results.json, table.md, measurements.parquet, traces, vocabulary, spec_bench",
    ]

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        methods = values["method"]
        wrong = dict(among("methods", values["methods"], methods))
        for name, others in values["against"].items():
            wrong |= among(f"against.{name}", others, methods)
        for name, settings in values["tried"].items():
            wrong |= dict(tried_misfits(name, settings, methods))
        return wrong


def tried_misfits(
    name: str, settings: Any, methods: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield faults in the lists of values to try for a method."""
    if name not in methods or name == CUSTOM:
        others = ", ".join(one for one in methods if one != CUSTOM)
        yield f"tried.{name}", f"a method that the command line does not make: {others}"
        return
    if not isinstance(settings, dict):
        yield f"tried.{name}", f"settings of the method, such as tried.{name}.stop.<setting>=[1,2]"
        return
    for key, values in leaves(settings).items():
        if not (isinstance(values, list) and values):
            yield f"tried.{name}.{key}", f"a list of values, such as tried.{name}.{key}=[1,2]"
            continue
        for value in values:
            yield from (
                (f"tried.{name}.{key}", f"a list, each {fault.expected}")
                for fault in faults(Method, with_value(methods[name], key.split("."), value))
            )


def with_value(settings: Any, names: list[str], value: Any) -> Any:
    """Return a copy of the settings in which the one at the path `names` is `value`."""
    if not names:
        return value
    first, *others = names
    inside = settings if isinstance(settings, dict) else {}
    return {**inside, first: with_value(inside.get(first), others, value)}


@program(__file__, Evaluate)
def main(settings: Evaluate) -> None:
    from evaluation.evaluate import evaluate

    evaluate(settings.composed)


class Expected(Methods):
    what: Annotated[Literal["expected"], MODES, WHAT]
    pair: Pair
    methods: Annotated[SomeNames, "keys of `method` to compare"]
    against: Annotated[Text | None, "the one the others differ from; null: the first of `methods`"]
    data: Annotated[Path, "harvest whose responses the contexts are of, with the pair's tokenizer"]
    split: Annotated[AnySplit, "its prompts that are taken"]
    splits: Splits
    prompts: Limit
    positions: Annotated[Count, "contexts of a response, evenly spread"]
    draws: Annotated[Count, "drafts of a method in a context"]
    seed: Annotated[Seed, "of the drafts"]
    logger: Logger
    out: Annotated[Output, "folder of expected.json and table.md"]

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        wrong = dict(among("methods", values["methods"], values["method"]))
        if values["against"] not in (None, *values["methods"]):
            wrong["against"] = f"null or one of methods: {', '.join(values['methods'])}"
        return wrong


@main.mode("expected", Expected)
def expected(settings: Expected) -> None:
    from evaluation.expect import expect

    expect(settings.composed)


class Served(Methods):
    what: Annotated[Literal["served"], MODES, WHAT]
    pair: Pair
    dataset: Dataset
    methods: Annotated[SomeNames, "keys of `method` to compare, of engines that serve"]
    against: Annotated[Text, "the one without a draft, which always runs"]
    requests: Annotated[
        list[Count], Field(min_length=1), Distinct, Says("a list such as [1,2,4,8]"),
        "numbers of requests that are asked at once",
    ]  # fmt: skip
    data: Annotated[
        Path | None,
        "greedy harvest of these prompts, a round at every position, whose replay says what is"
        " accepted; null: none",
    ]
    split: Annotated[AnySplit, "prompts that are taken, here and of `data`"]
    splits: Splits
    limit: Limit
    max_new_tokens: Annotated[Count, "most tokens of a response"]
    repeats: Annotated[Count, "times that every group is decoded"]
    waves: Annotated[
        Count,
        "requests of a group for each of those at once; 1: all begin together; more: as one ends"
        " the next begins, as on a server with a queue",
    ]
    by_category: Annotated[
        bool, "requests at once are of one set and category, and tables say the speed of each"
    ]
    seed: Annotated[Seed, "of the responses' draws"]
    logger: Logger
    out: Annotated[Output, "folder of served.json, table.md and measurements.parquet"]

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        wrong = among("methods", values["methods"], values["method"])
        return dict(wrong) | dict(among("against", [values["against"]], values["method"]))


@main.mode("served", Served)
def served(settings: Served) -> None:
    from evaluation.served import serve

    serve(settings.composed)


if __name__ == "__main__":
    main()
