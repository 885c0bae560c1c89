"""Makes block.onnx, two products in float32 with random weights, and inputs for it.

python examples/block.py
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper, parser

GRAPH = """<ir_version: 9, opset_import: ["": 17]>
block (float[batch, 512] x) => (float[batch, 512] y) {
    [up] h = MatMul(x, up_weight)
    r = Relu(h)
    [down] y = MatMul(r, down_weight)
}"""
random = np.random.default_rng(0)
model = parser.parse_model(GRAPH)
for name, shape in (("up_weight", (512, 512)), ("down_weight", (512, 512))):
    weight = (random.standard_normal(shape) / 32).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, name))
onnx.save(model, "block.onnx")
parts = random.standard_normal((24, 512))  # what real inputs have in common
samples = (random.standard_normal((264, 24)) @ parts / 5).astype(np.float32)
np.savez("samples.npz", x=samples[:256])
np.savez("others.npz", x=samples[256:])
