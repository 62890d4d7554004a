"""Which further fields of a request may be set, and which would make a server answer something else
than the harvest asks for: another distribution, another length, another prompt, another form."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from data_gen.prompts import Prompt
from data_gen.settings import HarvestSettings
from runtime.errors import UserError

ARGUMENTS = "chat_template_kwargs"
SETTING = {
    "model": "responses.model",
    "temperature": "warp.temperature",
    "topp": "warp.top_p",
    "topk": "warp.top_k",
    "maxtokens": "max_new_tokens",
    "maxcompletiontokens": "max_new_tokens",
    "maxnewtokens": "max_new_tokens",
    "seed": "seed",
    "stream": None,
}
# Names, without case and punctuation, of what changes answers. Engines have more of them every
# month, so what they have in common is written down.
CHANGES = re.compile(
    "^temp|temperature|dynatemp|^top(k|p|a|h|n)|topnsigma|minp|^typp$|typical|^tfs|mirostat|^xtc"
    "|^dry|epsiloncutoff|etacutoff|smoothing|sampler|dosample|watermark|guidance|^cfg|negative"
    "|penal|repeat|repetition|ngram|logit|bias|badwords|banned|suppress|forced|allowed|stop|eos|bos"
    "|maxlength|minlength|npredict|numpredict|tmaxpredict|maxtime|tokens$|budget|beam|bestof"
    "|returnseq|seed|stream|echo|suffix|guided|structur|responseformat|grammar|regex|schema|ebnf"
    "|lark|lora|adapter|truncat|transforms|prompt|template|messages|^inputs?$|inputids|embeds"
    "|^image|^audio|^video|multimodal|mmprocessor|mmdata|modalit|document|tool|function|reason"
    "|think|effort|verbosity|specialtokens|generationprompt|finalmessage|customparams|^nkeep"
    "|ndiscard|nindent|steering|greedy|^sampl|^decoding|^diversity|^system|^assistant|instruction"
    "|^end(id|token)|^until$|^prefi(x|ll)|^format|^raw$|history|^plugins|websearch|contextlength"
    "|^provider|quantiz"
)
NAMES = {"n", "model", "models"}
# What matches and changes no answer, and what does so with a value of its own alone.
HARMLESS = re.compile(
    "logprob|cacheprompt|promptcache|streamoptions|skipspecialtokens|spacesbetweenspecialtokens"
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "minp": (0,),
    "typicalp": (1,),
    "typp": (1,),
    "repetitionpenalty": (1,),
    "repeatpenalty": (1,),
    "lengthpenalty": (1,),
    "presencepenalty": (0,),
    "frequencypenalty": (0,),
    "norepeatngramsize": (0,),
    "mirostat": (0,),
    "xtcprobability": (0,),
    "drymultiplier": (0,),
    "dynatemprange": (0,),
    "epsiloncutoff": (0,),
    "etacutoff": (0,),
    "n": (1,),
    "bestof": (1,),
    "numbeams": (1,),
    "numreturnsequences": (1,),
    "mintokens": (0,),
    "minnewtokens": (0,),
    "minlength": (0,),
    "ignoreeos": (False,),
    "stream": (False,),
    "echo": (False,),
    "usebeamsearch": (False,),
    "logitbias": ({},),
    "stop": ([],),
    "includestopstrinoutput": (False,),
    "earlystopping": (False,),
    "responseformat": ({"type": "text"},),
    "stoptokenids": ([],),
    "badwords": ([],),
    "addgenerationprompt": (True,),
    "continuefinalmessage": (False,),
}


def asked_by(settings: HarvestSettings) -> dict[str, Any]:
    """Return what a harvest asks of every answer, by normalised name."""
    warp = settings.warp
    return {
        "temperature": warp.temperature,
        "topp": warp.top_p,
        "topk": warp.top_k,
        "dosample": warp.temperature > 0,
        **dict.fromkeys(
            ("maxtokens", "maxcompletiontokens", "maxnewtokens"), settings.max_new_tokens
        ),
    }


def refuse_changes(extra: Any, asked: Mapping[str, Any]) -> None:
    """Raise UserError for the first of the fields `extra`, at any depth, that would change the
    answers. asked: what the harvest asks for, by normalised name; a field may repeat that."""
    for path, name, value in _fields(extra):
        if name in asked:
            same = _equal(value, asked[name]) or (name, value, asked[name]) == ("topk", -1, 0)
        else:
            watched = name in NAMES or CHANGES.search(name) and not HARMLESS.search(name)
            neutral = value is None or any(_equal(value, one) for one in NEUTRAL.get(name, ()))
            same = neutral or not watched
        if not same:
            setting = SETTING.get(name)
            remedy = f"Set {setting} instead" if setting else "Leave it out"
            raise UserError(
                f"responses.extra.{path}: expected a field that leaves the answers as they are,"
                f" got {json.dumps(value, default=str)[:80]}, which changes their distribution,"
                f" length, prompt or form. {remedy}"
            )


def _fields(values: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Path, normalised name and value of every field, also in lists and in text that is JSON."""
    if isinstance(values, str) and values.lstrip().startswith(("{", "[")):
        try:
            values = json.loads(values)
        except ValueError:
            return
    if isinstance(values, list):
        for value in values:
            yield from _fields(value, path)
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        if key == ARGUMENTS and not path:
            continue  # compared with dataset.template
        name = re.sub("[^a-z0-9]", "", str(key).lower())
        where = f"{path}.{key}".lstrip(".")
        yield where, name, value
        if name != "metadata":  # notes that a server keeps
            yield from _fields(value, where)


def _equal(value: Any, expected: Any) -> bool:
    return bool(value == expected) and isinstance(value, bool) == isinstance(expected, bool)


def refuse_other_arguments(extra: Mapping[str, Any], prompt: Prompt) -> None:
    """Raise UserError where the fields `extra` give a server other arguments for its chat template
    than the prompt is rendered with here."""
    given = extra.get(ARGUMENTS)
    if given is not None and given != dict(prompt.template):
        raise UserError(
            f"responses.extra.{ARGUMENTS}: expected {dict(prompt.template)}, as dataset.template,"
            f" got {given}: prompts would be rendered otherwise here. Set dataset.template,"
            " which the server is sent too, and leave it out"
        )
