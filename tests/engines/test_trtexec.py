"""Which arguments each trtexec gets, and that the script around them is one a shell reads."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofour.engines.tensorrt.bindings import Precisions
from twofour.engines.trtexec import RELEASES, Releases, releases_of, script_text, trtexec_commands
from twofour.errors import BadInputError
from twofour.records.options import AllowedType, BuildOptions, ShapeProfile

FLOAT32 = Precisions(float16=False, bfloat16=False, int8=False)
FLOAT16 = Precisions(float16=True, bfloat16=False, int8=False)
BFLOAT16 = Precisions(float16=False, bfloat16=True, int8=False)
QUANTIZED = Precisions(float16=True, bfloat16=False, int8=True)
STEADY = ("--useCudaGraph", "--useSpinWait", "--noDataTransfers", "--separateProfileRun")


def sparse_arguments(
    version: str, options: BuildOptions | None = None, precisions: Precisions = FLOAT16
) -> tuple[str, ...]:
    variants, _ = trtexec_commands(
        releases_of(version), options or BuildOptions(iterations=20), precisions
    )
    assert [v.variant for v in variants] == ["sparse", "dense"]
    return variants[0].arguments


def profile(name: str) -> ShapeProfile:
    return ShapeProfile(input=name, min=(1, 3), opt=(8, 3), max=(16, 3))


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("8.5.10", "8.4 or 8.5"),
        ("8", "8.x from 8.6 on"),
        ("8.6.1.6", "8.x from 8.6 on"),
        ("10", "10.x"),
        ("10.x", "10.x"),
        ("v10.16.1.11", "10.x"),
        ("11.4.0", "11.x"),
    ],
)
def test_a_version_belongs_to_the_releases_with_its_flags(version: str, words: str) -> None:
    assert str(releases_of(version)) == words


@pytest.mark.parametrize("version", ["7.2", "8.3", "9.0", "12", "", "ten", "8.6-ea", "10,3", "-8"])
def test_a_version_without_a_script_is_refused(version: str) -> None:
    with pytest.raises(BadInputError, match="no build script for TensorRT") as error:
        releases_of(version)
    assert "10.3" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("version", "types", "steady"),
    [("8.4", ("--fp16",), STEADY), ("10.3", ("--stronglyTyped",), STEADY), ("11", (), ())],
)
def test_each_release_gets_exactly_the_flags_it_takes(
    version: str, types: tuple[str, ...], steady: tuple[str, ...]
) -> None:
    _, rounds = trtexec_commands(releases_of(version), BuildOptions(), FLOAT16)
    assert rounds.arguments == ("--warmUp=500", "--duration=1", *steady[:3])
    assert sparse_arguments(version) == (
        *("--onnx=sparse.onnx", "--saveEngine=sparse.plan", "--sparsity=enable", *types),
        *("--timingCacheFile=timing.cache", "--verbose", "--iterations=20", *steady),
        *("--profilingVerbosity=detailed", "--exportLayerInfo=sparse.layers.json"),
        *("--dumpProfile", "--exportProfile=sparse.profile.json"),
    )


@pytest.mark.parametrize("releases", RELEASES, ids=str)
def test_both_engines_differ_in_sparsity_and_file_names_alone(releases: Releases) -> None:
    (sparse, dense), _ = trtexec_commands(releases, BuildOptions(shapes=(profile("x"),)), FLOAT16)
    differing = [
        (one, other)
        for one, other in zip(sparse.arguments, dense.arguments, strict=True)
        if one != other
    ]
    assert differing[:2] == [
        ("--saveEngine=sparse.plan", "--saveEngine=dense.plan"),
        ("--sparsity=enable", "--sparsity=disable"),
    ]
    assert all(one.replace("sparse.", "dense.") == other for one, other in differing[2:])
    assert (sparse.sparse_weights, dense.sparse_weights) == (True, False)


@pytest.mark.parametrize(
    ("version", "precisions", "allow", "flags"),
    [
        ("8.6", FLOAT32, (), set()),
        ("8.6", FLOAT16, (), {"--fp16"}),
        ("8.6", QUANTIZED, (), {"--fp16", "--int8"}),
        ("10", QUANTIZED, (), {"--stronglyTyped"}),
        ("11", QUANTIZED, (), set()),
        ("8.6", FLOAT32, (AllowedType.FP16,), {"--fp16"}),
        ("8.4", FLOAT32, (AllowedType.FP16, AllowedType.INT8), {"--fp16", "--int8"}),
        ("10.3", FLOAT32, (AllowedType.FP16, AllowedType.BF16), {"--fp16", "--bf16"}),
    ],
)
def test_types_come_from_flags_before_10_or_if_allowed_and_from_the_graph_since(
    version: str, precisions: Precisions, allow: tuple[AllowedType, ...], flags: set[str]
) -> None:
    known = {"--fp16", "--int8", "--bf16", "--best", "--stronglyTyped"}
    arguments = sparse_arguments(version, BuildOptions(allow=allow), precisions)
    assert known & set(arguments) == flags


@pytest.mark.parametrize(
    ("allowed", "instead"),
    [(AllowedType.FP16, "--precision float16"), (AllowedType.INT8, "--quantize int8")],
)
def test_types_cannot_be_allowed_from_11_on(allowed: AllowedType, instead: str) -> None:
    with pytest.raises(BadInputError, match=f"--{allowed.value} ended with TensorRT 10") as told:
        sparse_arguments("11", BuildOptions(allow=(allowed,)))
    assert instead in (told.value.hint or "")


def test_bfloat16_is_refused_before_10() -> None:
    with pytest.raises(BadInputError, match=r"bfloat16, which TensorRT 8\.x from 8\.6 on"):
        sparse_arguments("8.6", precisions=BFLOAT16)


def test_tf32_iterations_and_the_optimization_level_are_passed_on() -> None:
    options = BuildOptions(
        tf32=False, iterations=7, optimization_level=5, workspace_bytes=1536 << 20
    )
    arguments = set(sparse_arguments("8.6", options))
    assert {"--noTF32", "--iterations=7", "--builderOptimizationLevel=5"} <= arguments
    assert "--memPoolSize=workspace:1536" in arguments
    assert "--noTF32" not in sparse_arguments("8.6")


def test_an_optimization_level_is_refused_before_8_6() -> None:
    with pytest.raises(BadInputError, match=r"8\.4 or 8\.5 has no builder optimization level"):
        sparse_arguments("8.5", BuildOptions(optimization_level=3))


def test_shapes_of_several_inputs_stand_in_one_flag_each() -> None:
    arguments = sparse_arguments("10", BuildOptions(shapes=(profile("x:0"), profile("in put"))))
    assert [a for a in arguments if "Shapes" in a] == [
        "--minShapes=x:0:1x3,in put:1x3",
        "--optShapes=x:0:8x3,in put:8x3",
        "--maxShapes=x:0:16x3,in put:16x3",
    ]


@given(name=st.text(st.characters(exclude_characters="\0,'*", exclude_categories=["Cs"])))
def test_a_shell_reads_back_every_argument_whatever_the_input_is_called(name: str) -> None:
    options = BuildOptions(shapes=(profile(name),))
    releases = releases_of("10")
    variants, rounds = trtexec_commands(releases, options, FLOAT16)
    text = script_text(releases, variants, rounds)
    _, found, call = text.partition("\nbuild sparse \\\n")
    words = shlex.split(call.replace("\\\n", " ")) if found else []
    arguments = variants[0].arguments
    assert tuple(words[: len(arguments) + 1]) == (*arguments, "$@")
    _, found, call = text.partition('--loadEngine="${engine%-again}.plan" \\\n')
    words = shlex.split(call.replace("\\\n", " ")) if found else []
    assert rounds.arguments[0] == f"--shapes={name}:8x3"
    passed = (*rounds.arguments, "--exportTimes=$file.json")
    assert tuple(words[: len(passed)]) == passed
