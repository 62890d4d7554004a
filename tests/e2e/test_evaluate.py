"""scripts/evaluate.py from its command line, every method, on a tiny pair."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from decoding.draft import Verdict
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.models.loading import load_pair, pair_identity
from decoding.trace import Trace, read_traces
from decoding.verifiers.token import TokenVerifier
from evaluation import runner, token_texts
from runtime.files import only_writer
from scripts import evaluate
from tests.checkpoints import write_checkpoint
from tests.processes import end, forked, wait_for

ROOT = Path(__file__).parents[2]
GREEDY = ("warp=greedy", "draft_warp.temperature=0")
LEARNED = ("specdecpp", "hrad")
METHODS = ["autoregressive", "fixed", "confidence", "product", "adaedl", *LEARNED]
ALL = f"methods=[{','.join(METHODS)}]"


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def base(tiny_pair_dir: Path, tmp_path: Path) -> list[str]:
    """Overrides that make the program small: a tiny pair, six prompts, few tokens."""
    prompts = [
        {"prompt": f"w{n} w{n + 1} w2", "dataset": "odd" if n % 2 else "even"} for n in range(1, 7)
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return [
        *(f"pair.{side}={tiny_pair_dir / side}" for side in ("target", "draft")),
        *(
            "pair.dtype=float64",
            "dataset=jsonl",
            "dataset.path=prompts.jsonl",
            "dataset.chat=false",
        ),
        *(
            "split=all",
            "limit=4",
            "max_new_tokens=14",
            "repeats=2",
            "tried.fixed.stop.gamma=[1,3]",
            "tried_prompts=1",
            "logger=none",
            "out=runs/x",
        ),
    ]


def identity(base: list[str]) -> dict[str, Any]:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return pair_identity(load_pair(compose("evaluate", base).pair))


def write_checkpoints(base: list[str], warp: dict[str, Any], **changes: Any) -> None:
    context = {"pair": identity(base), "warp": warp, "draft_warp": warp, **changes}
    for name, dim in zip(LEARNED, (24, 48), strict=True):
        write_checkpoint(Path("checkpoints") / name, name, dim, gamma=3, context=context)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    GlobalHydra.instance().clear()
    monkeypatch.setattr("sys.argv", ["evaluate.py", *arguments])
    evaluate.main()


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    with pytest.raises(SystemExit) as exit_code:
        run(monkeypatch, *arguments)
    assert exit_code.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ")
    assert not Path("runs").exists()
    return message


def test_two_runs_do_not_write_one_folder(
    base: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def hold() -> None:
        with only_writer(Path("runs/x")):
            (tmp_path / "begun").touch()
            time.sleep(60)

    child = forked(hold)
    wait_for(tmp_path, "begun")
    with pytest.raises(SystemExit):
        run(monkeypatch, *base, "methods=[autoregressive]")
    assert "error: out: another process is making runs/x. Wait for it" in capsys.readouterr().err
    end(child)
    run(monkeypatch, *base, "methods=[autoregressive]")
    assert Path("runs/x/results.json").is_file() and not list(Path("runs").glob(".*"))


def test_greedy_equals_autoregressive_for_every_method(
    base: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoints(base, {"temperature": 0.0, "top_k": 0, "top_p": 1.0})
    run(monkeypatch, *base, *GREEDY, ALL, "profile=true", "structure.gamma_max=6")
    printed, out = capsys.readouterr().out, Path("runs/x")
    assert printed.count("8 of 8 outputs equal autoregressive decoding (equal)") == len(METHODS) - 1
    assert "Share of decode time" in printed and "## odd: 3 prompts, 2 repeats" in printed
    assert (out / "table.md").read_text().strip() in printed

    results = json.loads((out / "results.json").read_text())
    assert list(results["metrics"]["pooled"]) == METHODS
    assert set(results["metrics"]["datasets"]) == {"even", "odd"}
    assert set(results["tried"]["fixed"]) == {"stop.gamma=1", "stop.gamma=3"}
    assert 0 < results["metrics"]["pooled"]["confidence"]["acceptance"] < 1
    traces = {name: read_traces(out / f"traces-{name}.jsonl") for name in METHODS}
    assert {len(found) for found in traces.values()} == {8}
    texts = token_texts.read(out)
    assert texts.prompt(traces["hrad"][0]).startswith("w") and len(texts.prompts) == 4
    assert all(
        token in texts.tokens
        for found in traces.values()
        for trace in found
        for token in trace.tokens
    )
    plain = [trace.tokens for trace in traces["autoregressive"]]
    assert all([trace.tokens for trace in found] == plain for found in traces.values())


def test_a_dataset_may_be_called_all(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers stand beside those of all prompts, in the table and in results.json."""
    names = ["all", "odd", "odd"]
    prompts = [{"prompt": f"w{n} w2", "dataset": name} for n, name in enumerate(names, 1)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    run(monkeypatch, *base, "methods=[custom]", "repeats=1")
    metrics = json.loads(Path("runs/x/results.json").read_text())["metrics"]
    requests = {name: of["custom"]["requests"] for name, of in metrics["datasets"].items()}
    assert metrics["pooled"]["custom"]["requests"] == 3 and requests == {"all": 1, "odd": 2}
    headings = [
        line
        for line in Path("runs/x/table.md").read_text().splitlines()
        if line.endswith("1 repeats")
    ]
    assert headings == [
        "## all: 3 prompts, 1 repeats",
        '## "all": 1 prompts, 1 repeats',
        "## odd: 2 prompts, 1 repeats",
    ]


def test_sampling_is_reproducible_and_checks_invariants(
    base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = (*base, "methods=[custom]", "stop=confidence_before", "verifier=block", "repeats=1")
    run(monkeypatch, *small)
    first = [trace.tokens for trace in read_traces(Path("runs/x/traces-custom.jsonl"))]
    run(monkeypatch, *small)
    assert [trace.tokens for trace in read_traces(Path("runs/x/traces-custom.jsonl"))] == first
    lines = json.loads(Path("runs/x/results.json").read_text())["lossless"]
    assert "hold" in lines[0] and "proven lossless" in lines[1]


def test_an_interrupted_run_is_taken_up_by_the_same_command(
    base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by no other: other settings are another run."""
    small = (*base, "methods=[custom]", "repeats=1")
    decode, calls = AutoregressiveEngine.decode, 0

    def interrupted(*arguments: Any) -> Trace:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(AutoregressiveEngine, "decode", interrupted)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(monkeypatch, *small)
    assert len(list(Path("runs").glob(".x-*.resume"))) == 1 and not Path("runs/x").exists()
    run(monkeypatch, *small, "pair.draft_dtype=float32", "out=runs/x")
    assert not json.loads(Path("runs/x/results.json").read_text())["resumed"]
    assert calls == 4 + 5, "a warm-up and four requests"
    run(monkeypatch, *small)
    assert calls == 9 + 1 + 2, "the warm-up and the two requests that were missing"
    assert not list(Path("runs").glob(".*"))
    assert json.loads(Path("runs/x/results.json").read_text())["resumed"] == 2
    assert "more than one sitting" in Path("runs/x/table.md").read_text()
    assert len(read_traces(Path("runs/x/traces-custom.jsonl"))) == 4


def test_settings_are_tried_on_prompts_that_are_not_judged(
    base: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pass that chooses the fixed length sees calibration prompts alone; a length that is
    given is not chosen."""
    decoded: dict[str, set[str]] = {}
    whole = runner.decode

    def seen(cfg: Any, engines: Any, requests: Any, *more: Any) -> Any:
        stage = "judged" if "autoregressive" in engines else "tried"
        decoded[stage] = {request.split + request.prompt_id for request in requests}
        return whole(cfg, engines, requests, *more)

    monkeypatch.setattr(runner, "decode", seen)
    monkeypatch.setattr("programs.evaluate.decode", seen)
    small = (*base, "methods=[fixed]", "split=test", "repeats=1", "tried_prompts=2")
    splits = ("splits.calibration=0.3", "splits.test=0.3")
    run(monkeypatch, *small, *splits)
    assert {name[:11] for name in decoded["tried"]} == {"calibration"}
    assert {name[:4] for name in decoded["judged"]} == {"test"}
    results = json.loads(Path("runs/x/results.json").read_text())
    method = results["methods"]["fixed"]
    assert "the fastest of 2 on" in method["note"] and "of the calibration split" in method["note"]
    speeds = results["tried"]["fixed"]
    assert f"stop.gamma={method['settings']['stop']['gamma']}" == max(
        speeds, key=lambda k: speeds[k]
    )
    assert results["run"]["config"]["method"]["fixed"]["stop"]["gamma"] == 4, "as it was given"
    assert f"fixed: {method['note']}." in capsys.readouterr().out
    decoded.clear()
    run(monkeypatch, *small, *splits, "method.fixed.stop.gamma=2")
    results = json.loads(Path("runs/x/results.json").read_text())
    assert list(decoded) == ["judged"] and results["tried"] == {}
    decoded.clear()
    run(monkeypatch, *(word for word in small if word != "split=test"), *splits, "split=all")
    tried, judged = ({name[-2:] for name in decoded[stage]} for stage in ("tried", "judged"))
    assert tried and judged and not tried & judged, "of the whole set the others"
    assert results["methods"]["fixed"]["settings"]["stop"]["gamma"] == 2


def test_lookahead_needs_an_engine_and_nothing_else(
    base: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = (*base, "methods=[custom]", "engine=lookahead", "engine.window=3", "repeats=1")
    run(monkeypatch, *small, *GREEDY)
    assert "custom: 4 of 4 outputs equal autoregressive decoding (equal)" in capsys.readouterr().out
    traces = read_traces(Path("runs/x/traces-custom.jsonl"))
    assert sum(round_.accepted for trace in traces for round_ in trace.rounds) > 0
    run(monkeypatch, *small, "modelled=[measured,5]")
    assert "proven lossless" in capsys.readouterr().out
    modelled = json.loads(Path("runs/x/results.json").read_text())["modelled"]
    assert modelled["autoregressive"] == {"measured": 1, "5": 1} and modelled["custom"]["5"] > 1
    rounds = [
        round_
        for trace in read_traces(Path("runs/x/traces-custom.jsonl"))
        for round_ in trace.rounds
    ]
    assert max(round_.extra_rows for round_ in rounds) == 3 * 4 - 1, (
        "a full window, without the last committed token"
    )
    run(
        monkeypatch,
        *small,
        "~method.custom.structure",
        "~method.custom.verifier",
        "~method.custom.stop",
    )
    assert "proven lossless" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["warp=greedy", "draft_warp.temperature=0"]])
def test_a_checkpoint_that_is_not_there_is_made_by_two_commands(
    more: list[str],
    base: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An experiment may take another pair than the default."""
    message = refused(monkeypatch, capsys, *base, "experiment=specbranch", *more)
    pair = [one for one in base if one.startswith("pair.")]
    harvest = " ".join(["pair=smollm2", *pair, *more, "out=data/smollm2"])
    assert message.endswith(
        "method.specbranch.stop.checkpoint: no checkpoint in checkpoints/hrad-smollm2. Train one:"
        f" python scripts/gen_data.py {harvest}; python train.py predictor=hrad data=data/smollm2"
        " out=checkpoints/hrad-smollm2"
    )


def test_greedy_check_catches_a_lossy_rule(
    base: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that accepts every draft. Filters change nothing about a greedy target, so it is checked
    all the same."""
    verify = TokenVerifier.verify

    def credulous(self: TokenVerifier, draft: Any, p: Any, sampler: Any) -> Verdict:
        token = verify(self, draft, p, sampler).token
        return Verdict(len(draft), draft.path(len(draft)), token, len(draft))

    monkeypatch.setattr(TokenVerifier, "verify", credulous)
    run(monkeypatch, *base, *GREEDY, "warp.top_k=3", "methods=[custom]", "repeats=1")
    printed = capsys.readouterr().out
    assert "NOT LOSSLESS" in printed and "too large" in printed


def test_missing_and_foreign_checkpoints(
    base: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(monkeypatch, capsys, *base, "methods=[hrad]")
    assert (
        "method.hrad.stop.checkpoint: no checkpoint" in message
        and "python train.py predictor=" in message
    )
    warp = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    write_checkpoints(base, warp)
    message = refused(monkeypatch, capsys, *base, *GREEDY, "methods=[specdecpp]")
    assert "method.specdecpp.stop.checkpoint" in message and "warp.temperature" in message
    message = refused(monkeypatch, capsys, *base, "methods=[hrad]", "structure.gamma_max=2")
    assert "method.hrad.stop.checkpoint" in message and "structure.gamma_max is 2" in message
    write_checkpoints(base, warp, pair={"target": "another", "draft": "one", "tokenizer": "x"})
    assert "pair.draft" in refused(monkeypatch, capsys, *base, "methods=[hrad]")
    held = [
        "methods=[custom]",
        "stop=stop_loss",
        "stop.cost=none.json",
        "stop.rule._target_=decoding.stopping.specdecpp.SpecDecPPStop",
        "+stop.rule.checkpoint=checkpoints/specdecpp",
        "+stop.rule.bounds=[1,4]",
        "+stop.rule.order=paper",
    ]
    message = refused(monkeypatch, capsys, *base, *held)
    assert "method.custom" not in message and "stop.rule.checkpoint" in message


def test_costs_of_another_pair_are_refused_and_of_another_machine_warned_of(
    base: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "methods=[custom]",
        "stop=stop_loss",
        "stop.cost=cost.json",
        "max_new_tokens=4",
        "limit=1",
        "split=all",
    ]
    facts = {"seconds": {"draft": 1.0, "target": 1.0}, "measured_on": None}
    theirs = {"name": "theirs", "target": "x", "draft": "y", "tokenizer": "z"}
    Path("cost.json").write_text(json.dumps(facts | {"pair": theirs}))
    said = refused(monkeypatch, capsys, *base, *given)
    assert (
        "stop.cost: cost.json was measured with another target and draft and tokenizer. Measure"
        in said
    )
    Path("cost.json").write_text(json.dumps(facts | {"pair": None, "measured_on": {"threads": 64}}))
    assert "stop.cost: cost.json does not say with which hardware" in refused(
        monkeypatch, capsys, *base, *given
    )
    abacus = {
        "hardware": {"target": "abacus", "draft": "abacus"},
        "dtypes": {"target": "bead"},
        "threads": 64,
    }
    Path("cost.json").write_text(json.dumps(facts | {"pair": None, "measured_on": abacus}))
    run(monkeypatch, *base, *given)
    assert (
        "warning: cost.json was measured on another machine: hardware abacus, here"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("methods=[fastest]", "methods: expected names among autoregressive, fixed, "),
        ("repeats=0", "repeats: expected a whole number from 1 on, got 0"),
        (
            "tried.fixed.stop.gamma=[0,2]",
            "tried.fixed.stop.gamma: expected a list, each a whole number from 1 to 1000, got [0",
        ),
        (
            "tried.fixed.stop.gamma=[1,abc]",
            "tried.fixed.stop.gamma: expected a list, each a whole number from 1 to 1000, got [1",
        ),
        ("methods=[custom] stop=adaedl stop.step=nan", "stop.step: expected a number from "),
        ("tried.fixed.stop.gamma=4", "tried.fixed.stop.gamma: expected a list of values, such as "),
        ("tried.fixed.stop.gamma=[2,21]", "at most structure.gamma_max=20, got 21"),
        (
            "tried.fixed.stop.gamma=[]",
            "tried.fixed.stop.gamma: expected a list of values, such as ",
        ),
        (
            "+tried.fixed.stop.gama=[2]",
            "tried.fixed.stop.gama: expected a list, each gamma, perhaps, got [2]",
        ),
        (
            "+tried.fastest.stop.gamma=[2]",
            "tried.fastest: expected a method that the command line does not make: ",
        ),
        ("tried.fixed=4", "tried.fixed: expected settings of the method, such as "),
        ("methods=[hrad] method.hrad.stop._target_=os.system", ""),
        (
            "methods=[hrad] method.hrad.stop._target_=no_library.Rule",
            "stop._target_: expected a stop",
        ),
        (
            "methods=fixed",
            "methods: expected a list of different names, such as [a,b], got 'fixed'",
        ),
        ("presentation=figures", "presentation: expected table or paired, got 'figures'"),
        ("against.fixed=fixed", "against.fixed: expected a list of one or more different names, "),
        ("max_new_tokens=2.5", "max_new_tokens: expected a whole number from 1 on, got 2.5"),
        ("repeats=null", "repeats: expected a whole number from 1 on, got null"),
        ("split=dev", "split: expected train, calibration, test or all, got 'dev'"),
        ("out=prompts.jsonl/x", "out: prompts.jsonl/x cannot be made"),
        ("limit=0", "limit: expected a whole number from 1 on or null, got 0"),
        ("pair.draft=nowhere/at/all", "pair.draft: no model in nowhere/at/all"),
        ("max_new_tokens=2000", "pair.max_length"),
        ("method.fixed.stop.gama=3", "gama"),
        (
            "methods=[custom] method.custom.stop={_target_:decoding.stopping.never.Never}",
            "method.custom.stop: the custom method takes the top-level stop",
        ),
        (
            "engine=lookahead engine.ngram=1 methods=[custom]",
            "engine.ngram: expected a whole number from 2 to 16, got 1",
        ),
        (
            "engine=lookahead stop=adaedl methods=[custom]",
            "stop, engine: LookaheadEngine takes no stop",
        ),
        (
            "engine=lookahead structure.gamma_max=3 methods=[custom]",
            "structure, engine: LookaheadEngine takes no",
        ),
        (
            "modelled=[fast]",
            "modelled: expected a list of measured, pipeline and speed ratios above 0, ",
        ),
        (
            "modelled=[-1]",
            "modelled: expected a list of measured, pipeline and speed ratios above 0, ",
        ),
        (
            "modelled=5",
            "modelled: expected a list of measured, pipeline and speed ratios above 0, ",
        ),
        ("modelled=[.inf]", "modelled: expected a list of measured, pipeline and speed ratios"),
        ("methods=null", "methods: expected a list of different names, such as [a,b], got null"),
        ("methods=[fixed,fixed]", "methods: expected a list of different names"),
        ("thresholds=5", "thresholds: expected a path or null, got 5"),
        ("seed=18446744073709551616", "seed: expected a whole number from 0 to 4294967295"),
        ("+against.other=[fastest]", "against.other: expected names among autoregressive, "),
        ("+method.mine.engine=5", "method.mine.engine: expected a choice of the group engine"),
        ("+method.fixed.stops=5", "method.fixed.stops: expected stop, perhaps, got something else"),
        (
            "engine=lookahead engine.prompt_pool=2 methods=[custom]",
            "engine.prompt_pool: expected true or false, got 2",
        ),
    ],
)
def test_bad_settings_end_with_one_line(
    argument: str,
    words: str,
    base: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert words in refused(monkeypatch, capsys, *base, "methods=[fixed]", *argument.split())


@pytest.mark.parametrize("engine", ["overlapped", "pearl"])
def test_draft_and_target_side_by_side(
    engine: str,
    base: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = ("methods=[custom]", f"engine={engine}", "structure=branch_point", "stop=never")
    run(monkeypatch, *base, *GREEDY, *chosen, "structure.gamma_max=3", "profile=true")
    printed = capsys.readouterr().out
    assert "custom: 8 of 8 outputs equal autoregressive decoding (equal)" in printed
    assert "Draft and target side by side" in printed
    found = json.loads(Path("runs/x/results.json").read_text())["overlap"]["custom"]
    assert 0 <= found["waste_rate"] <= 1 and (found["draft_stages"] > 0) == (engine == "overlapped")
    with pytest.raises(SystemExit):
        run(monkeypatch, *base, *chosen[:2], "stop=never")
    assert "structure, engine: Chain" in capsys.readouterr().err
