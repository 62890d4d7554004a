"""scripts/evaluate.py from its command line, every method, on a tiny pair."""

import json
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from decoding.draft import Verdict
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.trace import Trace, read_traces
from decoding.verifiers.token import TokenVerifier
from evaluation import evaluate as flow
from evaluation import token_texts
from evaluation.decode import Stage
from evaluation.table import compare
from runtime.files import only_writer
from scripts import evaluate
from tests.helpers.evaluation.evaluating import METHODS, identity, refused, run, write_checkpoints
from tests.helpers.programs import programs
from tests.helpers.programs.processes import end, forked, wait_for
from tests.helpers.programs.programs import GREEDY, write_prompts
from tests.helpers.training.checkpoints import columns, write_checkpoint


def results() -> Any:
    return json.loads(Path("runs/x/results.json").read_text())


def custom_traces() -> list[Trace]:
    return read_traces(Path("runs/x/traces-custom.jsonl"))


def test_two_runs_do_not_write_one_folder(evaluating: list[str]) -> None:
    def hold() -> None:
        with only_writer(Path("runs/x")):
            Path("begun").touch()
            time.sleep(60)

    child = forked(hold)
    wait_for(Path(), "begun")
    message = programs.refused(evaluate, *evaluating, "methods=[autoregressive]")
    assert message.startswith("error: out: another process is making runs/x. Wait for it")
    end(child)
    run(*evaluating, "methods=[autoregressive]")
    assert Path("runs/x/results.json").is_file() and not list(Path("runs").glob(".*"))


@pytest.mark.smoke
def test_greedy_equals_autoregressive_for_every_method(evaluating: list[str]) -> None:
    write_checkpoints(evaluating, {"temperature": 0.0, "top_k": 0, "top_p": 1.0})
    every = f"methods=[{','.join(METHODS)}]"
    printed = run(*evaluating, *GREEDY, every, "verbose=true", "structure.gamma_max=6")
    out = Path("runs/x")
    assert printed.count("8 of 8 outputs equal plain decoding (equal)") == len(METHODS) - 1
    assert "Share of decode time" in printed and "## odd: 3 prompts, 2 repeats" in printed
    assert (out / "table.md").read_text().strip() in printed

    found = results()
    summary = found["summary"]
    assert list(summary["all"]) == METHODS and list(summary) == ["all", "even", "odd"]
    rows = pd.read_parquet(out / "measurements.parquet")
    assert len(rows) == 8 * len(METHODS) and set(rows["kind"]) == {"timed"}
    speed = compare(rows)["confidence"]
    assert list(speed) == summary["all"]["confidence"]["speed-up"], "one definition"
    assert f"{speed.value:.2f}x ({speed.low:.2f} to {speed.high:.2f})" in printed
    assert "\nUse " in printed and "\nMeasured on 4 prompts" in printed
    assert "| confidence at " in printed and "\n- confidence: Stop after drawing" in printed
    assert ", torch.float64; python " in printed
    assert set(found["tried"]["fixed"]) == {"stop.gamma=1", "stop.gamma=3"}
    assert 0 < summary["all"]["confidence"]["acceptance"][0] < 1
    traces = {name: read_traces(out / f"traces-{name}.jsonl") for name in METHODS}
    assert {len(found) for found in traces.values()} == {8}
    texts = token_texts.read(out)
    assert texts.prompt(traces["hrad"][0]).startswith("w")
    assert sum(map(len, texts.prompts.values())) == 4
    used = {token for each in traces.values() for trace in each for token in trace.tokens}
    assert used <= texts.tokens.keys()
    plain = [trace.tokens for trace in traces["autoregressive"]]
    assert all([trace.tokens for trace in found] == plain for found in traces.values())


def test_a_dataset_may_be_called_all(evaluating: list[str]) -> None:
    """Its numbers stand beside those of all prompts, in the table and in results.json."""
    names = enumerate(["all", "odd", "odd"], 1)
    write_prompts({"prompt": f"w{n} w2", "dataset": name} for n, name in names)
    run(*evaluating, "methods=[custom]", "repeats=1")
    found = results()
    assert found["prompts"] == {"all": 3, '"all"': 1, "odd": 2}
    assert set(found["summary"]) == set(found["prompts"])
    lines = Path("runs/x/table.md").read_text().splitlines()
    assert [line for line in lines if line.endswith("1 repeat")] == [
        "## all: 3 prompts, 1 repeat",
        '## "all": 1 prompt, 1 repeat',
        "## odd: 2 prompts, 1 repeat",
    ]


def test_sampling_is_reproducible_and_checks_invariants(evaluating: list[str]) -> None:
    rules = ("methods=[custom]", "stop=confidence_before", "verifier=block", "repeats=1")
    tokens = []
    for _ in range(2):
        run(*evaluating, *rules)
        tokens.append([trace.tokens for trace in custom_traces()])
    assert tokens[0] == tokens[1]
    lines = results()["lossless"]
    assert "is sound" in lines[0] and "lossless by construction" in lines[1]


def test_an_interrupted_run_is_taken_up_by_the_same_command(
    evaluating: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by no other: other settings are another run."""
    small = (*evaluating, "methods=[custom]", "repeats=1")
    decode, calls = AutoregressiveEngine.decode, 0

    def interrupted(*arguments: Any) -> Trace:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(AutoregressiveEngine, "decode", interrupted)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(*small)
    assert len(list(Path("runs").glob(".x-*.resume"))) == 1 and not Path("runs/x").exists()
    run(*small, "pair.draft_dtype=float32", "out=runs/x")
    assert not results()["resumed"]
    assert calls == 4 + 5, "a warm-up and four requests"
    run(*small)
    assert calls == 9 + 1 + 2, "the warm-up and the two requests that were missing"
    assert not list(Path("runs").glob(".*"))
    assert results()["resumed"] == 2
    assert "more than one sitting" in Path("runs/x/table.md").read_text()
    assert len(custom_traces()) == 4


def test_settings_are_tried_on_prompts_that_are_not_judged(
    evaluating: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass that chooses the fixed length sees calibration prompts alone; a length that is
    given is not chosen."""
    decoded: dict[str, set[str]] = {}
    whole = flow.decode

    def seen(stage: Stage, *more: Any) -> Any:
        name = "tried" if stage.name.startswith("trying") else "judged"
        decoded[name] = {request.split + request.prompt_id for request in stage.requests}
        return whole(stage, *more)

    monkeypatch.setattr(flow, "decode", seen)
    small = (*evaluating, "methods=[fixed]", "split=test", "repeats=1", "tried_prompts=2")
    splits = ("splits.calibration=0.3", "splits.test=0.3")
    run(*small, *splits)
    assert {name[:11] for name in decoded["tried"]} == {"calibration"}
    assert {name[:4] for name in decoded["judged"]} == {"test"}
    found = results()
    method = found["methods"]["fixed"]
    assert "the fastest of 1, 3 on" in method["note"] and "1 calibration prompt" in method["note"]
    speeds = found["tried"]["fixed"]
    assert f"stop.gamma={method['settings']['stop']['gamma']}" == max(speeds, key=speeds.get)
    assert found["run"]["config"]["method"]["fixed"]["stop"]["gamma"] == 4, "as it was given"
    assert f" {method['note']}." in Path("runs/x/table.md").read_text()
    decoded.clear()
    run(*small, *splits, "method.fixed.stop.gamma=2")
    found = results()
    assert list(decoded) == ["judged"] and found["tried"] == {}
    decoded.clear()
    run(*(word for word in small if word != "split=test"), *splits, "split=all")
    tried, judged = ({name[-2:] for name in decoded[stage]} for stage in ("tried", "judged"))
    assert tried and judged and not tried & judged, "of the whole set the others"
    assert found["methods"]["fixed"]["settings"]["stop"]["gamma"] == 2


def test_lookahead_needs_an_engine_and_nothing_else(evaluating: list[str]) -> None:
    small = (*evaluating, "methods=[custom]", "engine=lookahead", "engine.window=3", "repeats=1")
    equal = "custom: 4 of 4 outputs equal plain decoding (equal)"
    assert equal in run(*small, *GREEDY)
    assert sum(round_.accepted for trace in custom_traces() for round_ in trace.rounds) > 0
    assert "lossless by construction" in run(*small, "modelled=[measured,5]")
    rows = results()["summary"]["all"]
    assert rows["autoregressive"]["speed-up, measured"][0] == 1
    assert rows["custom"]["speed-up, c=5"][0] > 1
    rows = [round_.extra_rows for trace in custom_traces() for round_ in trace.rounds]
    assert max(rows) == 3 * 4 - 1, "a full window, without the last committed token"
    parts = (f"~method.custom.{part}" for part in ("structure", "verifier", "stop"))
    assert "lossless by construction" in run(*small, *parts)


@pytest.mark.parametrize("more", [[], ["warp=greedy", "draft_warp.temperature=0"]])
def test_a_checkpoint_that_is_not_there_is_made_by_two_commands(
    more: list[str], evaluating: list[str]
) -> None:
    """An experiment may take another pair than the default."""
    message = refused(*evaluating, "experiment=specbranch", *more)
    pair = [one for one in evaluating if one.startswith("pair.")]
    harvest = " ".join(["pair=smollm2", *pair, *more, "out=data/smollm2"])
    assert message.endswith(
        "method.specbranch.stop.checkpoint: no checkpoint in checkpoints/hrad-smollm2. Train one:"
        f" python scripts/gen_data.py {harvest}; python train.py predictor=hrad data=data/smollm2"
        " out=checkpoints/hrad-smollm2"
    )


def test_greedy_check_catches_a_lossy_rule(
    evaluating: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that accepts every draft. Filters change nothing about a greedy target, so it is checked
    all the same."""
    verify = TokenVerifier.verify

    def credulous(self: TokenVerifier, draft: Any, p: Any, sampler: Any) -> Verdict:
        token = verify(self, draft, p, sampler).token
        return Verdict(len(draft), draft.path(len(draft)), token, len(draft))

    monkeypatch.setattr(TokenVerifier, "verify", credulous)
    printed = run(*evaluating, *GREEDY, "warp.top_k=3", "methods=[custom]", "repeats=1")
    assert "NOT LOSSLESS" in printed and "too large" in printed


@pytest.mark.parametrize("engine", ["overlapped", "pearl"])
def test_draft_and_target_side_by_side(engine: str, evaluating: list[str]) -> None:
    chosen = ("methods=[custom]", f"engine={engine}", "structure=branch_point", "stop=never")
    printed = run(*evaluating, *GREEDY, *chosen, "structure.gamma_max=3", "verbose=true")
    assert "custom: 8 of 8 outputs equal plain decoding (equal)" in printed
    assert "Draft and target side by side" in printed
    found = results()["summary"]["all"]["custom"]
    assert 0 <= found["waste"][0] <= 1
    assert (found["draft stages"][0] > 0) == (engine == "overlapped")
    message = programs.refused(evaluate, *evaluating, *chosen[:2], "stop=never")
    assert "structure, engine: Chain" in message


# Grown drafts -------------------------------------------------------------------------------------

COSTS = {"seconds": {"draft": 1.0, "target": {"1": 4.0, "65": 5.0}}}
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}


@pytest.fixture
def given(evaluating: list[str]) -> list[str]:
    """A predictor for either temperature, and costs."""
    for name, temperature in TEMPERATURES.items():
        warp = {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        context = {"pair": identity(evaluating), "warp": warp, "draft_warp": warp}
        write_checkpoint(Path(name), "value", columns("value", 0), context=context)
    Path("costs.json").write_text(json.dumps(COSTS))
    methods = ("grown", "grown_greedy")
    return [*evaluating, *(f"method.{name}.structure.cost.file=costs.json" for name in methods)]


def test_greedy_drafts_grow_and_the_text_is_that_of_plain_decoding(given: list[str]) -> None:
    names = ["grown", "grown_greedy", "reranked"]
    checkpoints = [f"method.{name}.structure.checkpoint=greedy" for name in names[:2]]
    printed = run(*given, *GREEDY, *checkpoints, f"methods=[{','.join(names)}]", "verbose=true")
    assert printed.count("8 of 8 outputs equal plain decoding") == 3
    wide = {}
    for name in names:
        rounds = [r for t in read_traces(Path(f"runs/x/traces-{name}.jsonl")) for r in t.rounds]
        parents = [round_.draft_parents for round_ in rounds]
        wide[name] = any(len(set(found)) < len(found) for found in parents)
    assert wide == {"grown": False, "grown_greedy": True, "reranked": True}, (
        "siblings of a greedy draft are point masses"
    )


def test_sampled_drafts_grow(given: list[str]) -> None:
    run(*given, "methods=[grown]", "method.grown.structure.checkpoint=sampled")
    rounds = [r for t in read_traces(Path("runs/x/traces-grown.jsonl")) for r in t.rounds]
    assert any(round_.depth < len(round_.draft_tokens) for round_ in rounds)
    assert all(round_.seconds["stop"] > 0 for round_ in rounds if len(round_.draft_tokens) > 1)


@pytest.mark.slow
def test_what_does_not_fit_is_refused(given: list[str]) -> None:
    theirs = {"name": "theirs", "target": "whole x", "draft": "whole y", "tokenizer": "z"}
    Path("theirs.json").write_text(json.dumps(COSTS | {"pair": theirs}))
    key, sampled = "method.grown.structure", "checkpoint=sampled"
    for values, words in {
        "checkpoint=greedy": f"{key}.checkpoint: greedy was trained with",
        "checkpoint=nowhere": "train.py predictor=value",
        f"{sampled} cost.file=nowhere.json": f"{key}.cost.file: nowhere.json is missing",
        f"{sampled} cost.file=theirs.json": f"{key}.cost.file: theirs.json was measured with anoth",
        f"{sampled} siblings=17": f"{key}.siblings: expected",
    }.items():
        changes = [f"{key}.{value}" for value in values.split()]
        assert words in refused(*given, "methods=[grown]", *changes)
    table = [one for one in given if ".cost.file=" not in one]
    falling = (f"cost@{key}.cost=c5", f"{key}.cost.target={{3:5,1:4}}", f"{key}.{sampled}")
    message = refused(*table, "methods=[grown]", *falling)
    assert f"{key}.cost.target: expected numbers of rows in rising" in message


# What is refused, in one line each ----------------------------------------------------------------


@pytest.mark.slow
def test_missing_and_foreign_checkpoints(evaluating: list[str]) -> None:
    message = refused(*evaluating, "methods=[hrad]")
    assert "method.hrad.stop.checkpoint: no checkpoint" in message
    assert "python train.py predictor=" in message
    warp = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    write_checkpoints(evaluating, warp)
    message = refused(*evaluating, *GREEDY, "methods=[specdecpp]")
    assert "method.specdecpp.stop.checkpoint" in message and "warp.temperature" in message
    message = refused(*evaluating, "methods=[hrad]", "structure.gamma_max=2")
    assert "method.hrad.stop.checkpoint" in message and "structure.gamma_max is 2" in message
    other = {"target": "another", "draft": "one", "tokenizer": "x"}
    write_checkpoints(evaluating, warp, pair=other)
    assert "pair.draft" in refused(*evaluating, "methods=[hrad]")
    rule = "stop.rule._target_=decoding.stopping.specdecpp.SpecDecPPStop"
    held = ["methods=[custom]", "stop=stop_loss", "stop.cost=none.json", rule]
    held += ["+stop.rule.checkpoint=checkpoints/specdecpp", "+stop.rule.bounds=[1,4]"]
    message = refused(*evaluating, *held, "+stop.rule.order=paper")
    assert "method.custom" not in message and "stop.rule.checkpoint" in message


def test_costs_of_another_pair_are_refused_and_of_another_machine_warned_of(
    evaluating: list[str],
) -> None:
    given = [*evaluating, "methods=[custom]", "stop=stop_loss", "stop.cost=cost.json"]
    given += ["max_new_tokens=4", "limit=1", "split=all"]

    def measured(pair: dict[str, str] | None, on: dict[str, Any] | None) -> None:
        facts = {"seconds": {"draft": 1.0, "target": 1.0}, "pair": pair, "measured_on": on}
        Path("cost.json").write_text(json.dumps(facts))

    theirs = {"name": "theirs", "target": "whole x", "draft": "whole y", "tokenizer": "z"}
    measured(theirs, None)
    other = "was measured with another target and draft and eos_ids and tokenizer. Measure"
    assert f"stop.cost: cost.json {other}" in refused(*given)
    measured(None, {"threads": 64})
    assert "stop.cost: cost.json does not say with which hardware" in refused(*given)
    sides = {"target": "abacus", "draft": "abacus"}
    measured(None, {"hardware": sides, "dtypes": {"target": "bead"}, "threads": 64})
    warning = "warning: cost.json was measured on another machine: hardware abacus, here"
    assert warning in run(*given)


MODELLED = "modelled: expected a list of measured, pipeline and speed ratios above 0, "
OWN = "methods=[custom] stop=never verifier=rrsw"
OWN_STOP = "method.custom.stop"
NEVER = "{_target_:decoding.stopping.never.Never}"
TRIED = "tried.fixed.stop.gamma"


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("methods=[fastest]", "methods: expected names among autoregressive, fixed, "),
        ("methods=fixed", "methods: expected a list of different names, such as [a,b], got"),
        (f"{TRIED}=[0,2]", f"{TRIED}: expected a list, each a whole number from 1 to 1000, got [0"),
        (f"{TRIED}=4", f"{TRIED}: expected a list of values, such as "),
        (f"{TRIED}=[2,21]", "at most structure.gamma_max=20, got 21"),
        (f"{TRIED}=[]", f"{TRIED}: expected a list of values, such as "),
        ("+tried.fixed.stop.gama=[2]", "gama: expected a list, each gamma, perhaps, got [2]"),
        ("+tried.fastest.stop.gamma=[2]", "expected a method that the command line does not make"),
        ("tried.fixed=4", "tried.fixed: expected settings of the method, such as "),
        ("methods=[hrad] method.hrad.stop._target_=os.system", ""),
        ("methods=[hrad] method.hrad.stop._target_=no_library.Rule", "expected a stop"),
        ("against.fixed=fixed", "against.fixed: expected a list of one or more different names, "),
        ("+against.other=[fastest]", "against.other: expected names among autoregressive, "),
        ("out=prompts.jsonl/x", "out: prompts.jsonl/x cannot be made"),
        ("max_new_tokens=2000", "pair.max_length"),
        ("method.fixed.stop.gama=3", "gama"),
        (
            f"methods=[custom] {OWN_STOP}={NEVER}",
            f"{OWN_STOP}: the custom method takes the top-lev",
        ),
        (f"{OWN} structure=specinfer", "structure, verifier: SpecInfer draws siblings by iid"),
        (
            f"{OWN} structure=tree verifier=spechub structure.widths=[3]",
            "structure, verifier: Width",
        ),
        (f"{OWN} structure=dyspec verifier=rrs", "structure, verifier: DySpecHeap draws siblings"),
        (f"{OWN} structure=tree stop=fixed", "structure, stop: WidthTree asks no stop rule"),
        (f"{OWN} structure=sequoia", "structure.tree: runs/sequoia-smollm2-eagle-T1.0.json"),
        ("engine=lookahead stop=adaedl methods=[custom]", "stop, engine: LookaheadEngine takes no"),
        ("engine=lookahead structure.gamma_max=3 methods=[custom]", "structure, engine: Lookahead"),
        ("modelled=[fast]", MODELLED),
        ("modelled=[-1]", MODELLED),
        ("modelled=5", MODELLED),
        ("positions=8", "positions: expected a setting of this mode, got one of what=expected."),
        ("+method.mine.engine=5", "method.mine.engine: expected a choice of the group engine"),
        ("+method.fixed.stops=5", "method.fixed.stops: expected stop, perhaps, got something else"),
    ],
)
@pytest.mark.few(8, rest="slow")
def test_bad_settings_end_with_one_line(
    argument: str, words: str, evaluating: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if argument.startswith(OWN):
        monkeypatch.setattr(flow, "decode", None)  # it does not come to that
    assert words in refused(*evaluating, "methods=[fixed]", *argument.split())


def test_prompts_that_are_decoded_at_once(evaluating: list[str]) -> None:
    some = [*evaluating, *GREEDY, "methods=[fixed,sources]", "batch=2"]
    printed = run(*some, "verbose=true")
    assert printed.count("8 of 8 outputs equal plain decoding (equal)") == 2
    assert "2 prompts at once," in printed and "intervals over groups" in printed
    assert "Share of decode time" not in printed, "requests wait for each other"
    rows = pd.read_parquet("runs/x/measurements.parquet")
    assert set(rows["prompt"]) <= {f"group {n}" for n in range(1, 5)}
    assert rows.groupby("prompt")["dataset"].nunique().max() == 1
    assert rows["stop_seconds"].isna().all() and (rows["seconds"] > 0).all()
    assert all(
        round_.seconds["target"] == 0
        for x in read_traces(Path("runs/x/traces-fixed.jsonl"))
        for round_ in x.rounds
    )
