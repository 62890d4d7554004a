"""Hand-made evaluations in the viewer, and who uses it."""

from dataclasses import dataclass, replace
from pathlib import Path

from playwright.sync_api import Page

from decoding.trace import STAGES, RoundTrace, Span, Trace
from evaluation.token_texts import Vocabulary
from reports.artifacts import Evaluation
from reports.viewer.viewer import fragment
from tests.helpers.decoding.traces import chain, overlapped, plain

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
PAGE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport"'
    ' content="width=device-width"><meta http-equiv="Content-Security-Policy"'
    f' content="{POLICY}"><title>t</title><style>:root {{{{ color-scheme: light dark }}}} body {{{{'
    " max-width: 62rem; margin: 0 auto }}</style></head><body>{}</body></html>"
)
NASTY = "</script><script>throw 1</script><img src=http://localhost/x onerror=throw>"
TEXTS = {token: f" w{token}" for token in range(64)} | {5: "\n", 6: NASTY}


def timed(round_: RoundTrace, number: int) -> RoundTrace:
    seconds = dict.fromkeys(STAGES, 0.001 * number) | {"draft": 0.004, "target": 0.02}
    return replace(round_, seconds=seconds)


def scored() -> list[RoundTrace]:
    """p read up to the rejection, and what SpecDec++ predicted."""
    numbers = {"draft_p": [0.75, 0.125, None, None], "predicted": [0.9, 0.8, 0.6, 0.5]}
    found = [replace(chain([4, 5, 6, 7], 1, 9), **numbers)]
    found += [plain(8), replace(chain([6, 7], 2, 3), draft_p=[0.25, 0.5], predicted=[0.875])]
    return [timed(round_, number) for number, round_ in enumerate(found * 5)]


def branching() -> list[RoundTrace]:
    """A branch accepted and partly retained, then a rejection."""

    def spans(start: float) -> list[Span]:
        return [
            Span("draft", "draft stage", start, start + 0.25, 2),
            Span("draft", "branch stage", start + 0.25, start + 0.5, 4),
            Span("target", "verify", start + 0.25, start + 1.0, 2),
        ]

    tokens = [4], [[5, 7, 8], [10, 11]]
    first = overlapped(*tokens, row=2, tokens=[4, 5], outcome=1, spans=spans(1.0))
    second = overlapped([7], [[3]], row=0, tokens=[2], outcome=2, stage="branch", spans=spans(2.5))
    return [replace(first, draft_p=[0.75, 0.5, None]), second]


def trace(method: str, prompt: int, found: list[RoundTrace]) -> Trace:
    tokens = [token for round_ in found for token in round_.tokens]
    return Trace(3, tokens, found, 1.0, 4.0, prompt_id=f"p{prompt}", dataset="a", method=method)


def evaluation(
    name: str, methods: dict[str, list[list[RoundTrace]]], stops: dict[str, str]
) -> Evaluation:
    """methods: rounds by method and prompt."""
    traces = {
        m: [trace(m, prompt, one) for prompt, one in enumerate(found)]
        for m, found in methods.items()
    }
    made = {method: {"_target_": f"decoding.stopping.{rule}"} for method, rule in stops.items()}
    stop = {method: {"stop": rule} for method, rule in made.items()}
    config = {"repeats": 1, "warp": {"temperature": 1.0}, "method": stop}
    return Evaluation(Path("runs") / name, {"run": {"config": config}}, traces)


def written(folder: Path, *found: Evaluation) -> Path:
    texts = Vocabulary(TEXTS, {"a": {"p0": "Once upon a time"}})
    path = folder / "page.html"
    shown = fragment(found, {one.folder: texts for one in found})
    path.write_text(PAGE.format(shown), encoding="utf-8")
    return path


@dataclass
class Viewer:
    """What a user does and sees."""

    page: Page

    def pick(
        self, run: str = "first (T = 1)", method: str = "specdecpp", prompt: int = 0
    ) -> "Viewer":
        self.page.select_option("#viewer-run", label=run)
        self.page.select_option("#viewer-method", label=method)
        self.page.select_option("#viewer-prompt", index=prompt)
        self.page.focus("#viewer")
        return self

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)

    @property
    def round(self) -> int:
        return int(self.page.input_value("#viewer-slider"))

    @property
    def summary(self) -> str:
        return self.page.inner_text("#viewer-summary")

    def chips(self, part: str) -> list[tuple[str, str]]:
        """Mark and text of each."""
        texts = self.page.locator(f"#viewer-{part} button").all_text_contents()
        return [(text[0], text[1:]) for text in texts]

    @property
    def text(self) -> str:
        said = self.page.locator("#viewer-text span:not(.viewer-later)")
        return "".join(said.all_text_contents())

    def detail(self, chip: str) -> str:
        self.page.hover(chip)
        return self.page.inner_text("#viewer-detail")


def shown(token: int) -> str:
    return TEXTS[token].replace("\n", "↵")
