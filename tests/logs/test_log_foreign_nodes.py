"""What the log states of Myelin regions and the tensors of engine layers."""

from __future__ import annotations

from support.log_lines import parse_lines

from twofour.logs.layer_info import detailed_layer, listed_layer
from twofour.records.log import Build, LayerSources

REGION = "{ForeignNode[gemm2.bias + ONNXTRT_Broadcast_4...ONNXTRT_castHelper_9]}"


def built(*messages: str) -> Build:
    (found,) = parse_lines([f"[07/07/2026-02:11:09] [V] [TRT] {m}" for m in messages], name="b.log")
    return found


def test_the_nodes_of_a_region_are_those_its_metadata_states() -> None:
    line = f"ForeignNode {REGION} metadata: [ONNX Layer: a.b][ONNX Layer: c | d (e) | f (If)]"
    found = built("Original: 3 layers", line, line, f"--------------- Timing Runner: {REGION} (M)")
    assert found.layer_sources == (
        LayerSources(layer=REGION, onnx_nodes=("a.b", "c | d (e) | f (If)")),
    )


def test_the_operation_inside_of_a_region_is_led_back_to_its_nodes() -> None:
    found = built(
        " (foreignNode) Autotuning op fc_1_2: [ONNX Layer: fc_1][ONNX Layer: relu]",
        " (foreignNode) Autotuning op fc: [ONNX Layer: fc]",
        f"--------------- Timing Runner: {REGION} (M)",
    )
    assert found.layer_sources == (LayerSources(layer="fc_1_2", onnx_nodes=("fc_1", "relu")),)


def test_tensors_are_read_from_either_form_of_the_list_of_layers() -> None:
    new = listed_layer(
        "Layer(PointWiseV2): PWN(a), Tactic: 0x0000000000000000, "
        "(Unnamed Layer* 8) [Matrix Multiply]_output (Half[-1,1024]), c (1) (Half[1,1024]) -> "
        "relu_2 [profile 1] (Half[-1,32:2,28,28]), z (Int64[1])"
    )
    old = listed_layer(
        "Layer(NoOp): b, Tactic: 0, x:0[Float(-7,-8,1)], y[Half(1,32:2,8)] -> out[Float(-14,1,1,1)]"
    )
    constant = listed_layer("Layer(Constant): w, Tactic: 0x0000000000000000,  -> w_out (Half[1])")
    assert new is not None
    assert old is not None
    assert constant is not None
    assert new.inputs == ("(Unnamed Layer* 8) [Matrix Multiply]_output", "c (1)")
    assert new.outputs == ("relu_2 [profile 1]", "z")
    assert (old.inputs, old.outputs) == (("x:0", "y"), ("out",))
    assert (constant.inputs, constant.outputs) == ((), ("w_out",))


def test_tensors_of_a_detailed_line_are_read_up_to_the_last() -> None:
    found = detailed_layer(
        "Name: a + b [profile 1], LayerType: CaskConvolution, Inputs: [ { Name: x [profile 1], "
        "Location: Device, Dimensions: [-1,1,28,28], Format/Datatype: Float }], Outputs: "
        "[ { Name: y [profile 1], Location: Device, Dimensions: [-1,32], Format/Datatype: Half }, "
        "{ Name: z, Location: Device, Dimensions: [1], Format/Datatype: Int64 }], TacticName: k"
    )
    assert found is not None
    assert (found.inputs, found.outputs) == (("x [profile 1]",), ("y [profile 1]", "z"))
