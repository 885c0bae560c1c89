"""Messages that say one thing about a build: version, GPU, options, memory, time."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from twofour.logs.names import number
from twofour.records.log import Contradiction, SparsityFlag

_BANNER = re.compile(
    r"&&&& (?P<word>RUNNING|PASSED|FAILED|WAIVED) TensorRT\.?\S*(?: \[TensorRT v(?P<v>\d{3,8})\])?"
    r"(?: \[b\d+\])?(?: # (?P<command>.*))?"
)
_RESOURCE = re.compile(
    r"Loaded shared library \S*nvinfer_builder_resource(?:_sm(\d{2,3}))?\.so\.(\d+\.\d+\.\d+)"
)
_MODULE = re.compile(r"\s*\| Version: (\d+\.\d+\.\d+)")
_LINKED = re.compile(r"[Ll]inked against TensorRT (\d+\.\d+\.\d+)")
_LEVEL = re.compile(r"Set number of tactics to \d+ at optimization level (\d)")
_WORKSPACE = re.compile(r"Setting workspace to (\d{1,19}) ?enables more tactics")
_FLAGS = {
    "enable": SparsityFlag.ENABLED, "enabled": SparsityFlag.ENABLED,
    "disable": SparsityFlag.DISABLED, "disabled": SparsityFlag.DISABLED,
    "force": SparsityFlag.FORCED, "forced": SparsityFlag.FORCED,
}  # fmt: skip
_LOW_PRECISIONS = frozenset({"FP16", "BF16", "INT8", "FP8", "INT4", "FP4"})
"""Builder flags that allow a type beside FP32; without one a network may be strongly typed."""
_COMMAND_SPARSITY = re.compile(r"--sparsity=(\w+)|(--sparse-weights)")
_COMMAND_LEVEL = re.compile(r"--builderOptimizationLevel=(\d)")
_COMMAND_LOADS = re.compile(r"(?:^|\s)--(?:loadEngine|load-engine)[= ]\S")
"""Of trtexec and Polygraphy: the engine comes from a file."""
_COMMAND_MODEL = re.compile(r"--(?:onnx|loadEngine)=(\S+)")


@dataclass(slots=True)
class Facts:
    """What is known so far."""

    program_version: str | None = None
    """Of trtexec, as it was compiled."""
    library_version: str | None = None
    """Of the library that was loaded, which is the one that builds."""
    gpu: str | None = None
    capability: tuple[int, int] | None = None
    command: str | None = None
    model: str | None = None
    loads_engine: bool = False
    """The options name an engine to load."""
    flag: SparsityFlag | None = None
    precision: str | None = None
    level: int | None = None
    passes_s: float | None = None
    """Of all passes so far: TensorRT 10 builds an engine for each of its backend strategies."""
    earlier_s: float = 0.0
    """Of the passes before the latest."""
    under_way: bool = False
    """The builder's kernel library was loaded, and no engine is done since."""
    mixed: bool = False
    """It was loaded again then."""
    whole_s: float | None = None
    """What trtexec or Polygraphy measured around the builder."""
    workspace_bytes: int | None = None
    cache_mode: str | None = None
    cache_hits: int | None = None

    @property
    def version(self) -> str | None:
        """The library's, as far as the log tells it apart from the program's."""
        return self.library_version or self.program_version

    def contradictions(self) -> tuple[Contradiction, ...]:
        """A program compiled for another version than its library; lines of two builds mixed."""
        program, library = self.program_version, self.library_version
        found = []
        if program is not None and library is not None and program != library:
            found.append(f"the program is of TensorRT {program}, the library it loads is {library}")
        if self.mixed:
            found.append(
                "the builder's library is loaded twice before an engine is done: lines of two "
                "builds may be mixed here; log every process to a file of its own"
            )
        return tuple(Contradiction(line=None, message=message) for message in found)

    @property
    def build_s(self) -> float | None:
        """Seconds the builder took."""
        return self.whole_s if self.passes_s is None else self.passes_s

    def forget_options(self) -> None:
        """Of a loaded engine: what is printed of building are defaults that nothing used."""
        self.flag = self.precision = self.level = None


Setter = Callable[[Facts, str], None]


def banner(facts: Facts, message: str) -> bool:
    """Trtexec's RUNNING, PASSED or FAILED line: version and command; whether it is one."""
    match = _BANNER.match(message)
    if match is None:
        return False
    facts.program_version = _numbered_version(match["v"]) or facts.program_version
    if match["word"] == "RUNNING" and match["command"]:
        command(facts, match["command"].strip())
    return True


def command(facts: Facts, text: str) -> None:
    """The command line that made the build, and the options it states."""
    facts.command = text
    sparsity = _COMMAND_SPARSITY.search(text)
    if sparsity is not None:
        facts.flag = SparsityFlag.ENABLED if sparsity[2] else _FLAGS.get(sparsity[1].lower())
    level = _COMMAND_LEVEL.search(text)
    facts.level = int(level[1]) if level else facts.level
    facts.loads_engine = _COMMAND_LOADS.search(text) is not None
    model = _COMMAND_MODEL.search(text)
    facts.model = model[1] if model else facts.model


def _numbered_version(text: str | None) -> str | None:
    """8203 is 8.2.3 and 100300 is 10.3.0 (NvInferVersion.h of TensorRT 8 and 10)."""
    if text is None:
        return None
    value = int(text)
    if len(text) <= 4:
        return f"{value // 1000}.{value // 100 % 10}.{value % 100}"
    return f"{value // 10000}.{value // 100 % 100}.{value % 100}"


def _text(name: str) -> Setter:
    def put(facts: Facts, text: str) -> None:
        if text:
            setattr(facts, name, text)

    return put


def _engine_to_load(facts: Facts, text: str) -> None:
    facts.loads_engine = facts.loads_engine or bool(text)


def _pass_seconds(facts: Facts, text: str) -> None:
    value = number(text.split(" ", 1)[0])
    facts.under_way = False
    if value is not None:
        facts.passes_s = facts.earlier_s + value


def _whole_seconds(facts: Facts, text: str) -> None:
    value = number(text.split(" ", 1)[0])
    facts.whole_s = facts.whole_s if value is None else value


def _version(facts: Facts, text: str) -> None:
    if re.fullmatch(r"\d{1,3}(?:\.\d{1,4}){1,3}", text):
        facts.program_version = facts.program_version or ".".join(text.split(".")[:3])


def _capability(facts: Facts, text: str) -> None:
    match = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    facts.capability = (int(match[1]), int(match[2])) if match else facts.capability


def _sparsity(facts: Facts, text: str) -> None:
    facts.flag = _FLAGS.get(text.split(" ", 1)[0].lower(), facts.flag)


def _level(facts: Facts, text: str) -> None:
    facts.level = int(text) if text.isdigit() and len(text) == 1 else facts.level


def _level_used(facts: Facts, text: str) -> None:
    match = _LEVEL.match(f"Set number of tactics to {text}")
    facts.level = int(match[1]) if match else facts.level


def _flags(facts: Facts, text: str) -> None:
    """Polygraphy's table of builder flags."""
    name, bar, value = f"Flags{text}".partition("|")
    if bar and name.strip() == "Flags":
        flags = value.strip().strip("[]").split(", ")
        listed = "SPARSE_WEIGHTS" in flags
        facts.flag = SparsityFlag.ENABLED if listed else SparsityFlag.DISABLED
        low = [flag for flag in flags if flag in _LOW_PRECISIONS]
        if low and facts.precision is None:
            facts.precision = "+".join(("FP32", *low))


def _resource(facts: Facts, text: str) -> None:
    """The builder's kernel library carries the GPU's architecture and TensorRT's version."""
    match = _RESOURCE.match(f"Loaded shared library {text}")
    if match is None:
        return
    facts.mixed = facts.mixed or facts.under_way
    facts.under_way = True
    facts.library_version = match[2]
    if match[1] and facts.capability is None:
        facts.capability = (int(match[1][:-1]), int(match[1][-1]))


def _module(facts: Facts, text: str) -> None:
    match = _MODULE.match(text)
    facts.library_version = match[1] if match else facts.library_version


def _linked(facts: Facts, text: str) -> None:
    match = _LINKED.search(f"linked against TensorRT {text}")
    facts.program_version = facts.program_version or (match[1] if match else None)


def _cache(facts: Facts, text: str) -> None:
    hits = re.search(r"(?:served )?(\d{1,9}) hits?", text)
    facts.cache_hits = int(hits[1]) if hits else facts.cache_hits


def _workspace(facts: Facts, text: str) -> None:
    match = _WORKSPACE.match(f"Setting workspace to {text}")
    if match is not None:
        facts.workspace_bytes = max(facts.workspace_bytes or 0, int(match[1]))


def _cache_mode(mode: str) -> Setter:
    def put(facts: Facts, _: str) -> None:
        facts.cache_mode = mode

    return put


def _of_a_build(_facts: Facts, _text: str) -> None:
    """Nothing is kept of it; that it stands there shows a build."""


_OTHER_FIGURES = (
    "Profiling verbosity: ", "Total Host Persistent Memory: ", "Total Device Persistent Memory: ",
    "Total Scratch Memory: ", "Max Scratch Memory: ", "Total Activation Memory: ",
    "Total Weights Memory: ", "Loaded engine size: ", "Created engine with size: ",
    "[MemUsageStats] Peak memory usage ",
)  # fmt: skip
ONE_LINERS: tuple[tuple[str, Setter], ...] = (
    ("Selected Device: ", _text("gpu")),
    ("Compute Capability: ", _capability),
    ("TensorRT version: ", _version),
    ("Loaded shared library ", _resource),
    ("Loaded Module: tensorrt", _module),
    ("TensorRT was linked against TensorRT ", _linked),
    ("Model: ", _text("model")),
    ("Input filename: ", _text("model")),
    ("Loading model: ", _text("model")),
    ("Load engine: ", _engine_to_load),
    ("Sparsity: ", _sparsity),
    ("Flags   ", _flags),
    ("Precision: ", _text("precision")),
    ("BuilderOptimizationLevel: ", _level),
    ("Set number of tactics to ", _level_used),
    ("Engine generation completed in ", _pass_seconds),
    ("Engine built in ", _whole_seconds),
    ("Finished engine building in ", _whole_seconds),
    ("Setting workspace to ", _workspace),
    ("Local timing cache in use", _cache_mode("local")),
    ("Global timing cache in use", _cache_mode("global")),
    ("Deleting timing cache: ", _cache),
    *((start, _of_a_build) for start in _OTHER_FIGURES),
)
