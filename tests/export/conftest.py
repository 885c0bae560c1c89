"""One export of `Kinds` for each precision, shared by the tests of this folder."""

from __future__ import annotations

import onnx
import pytest
from export_nets import Exported, example, kinds

from twofour.export.onnx_export import export_onnx
from twofour.records import ExportOptions, Precision


@pytest.fixture(scope="session", params=list(Precision), ids=lambda p: p.value)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    precision: Precision = request.param
    path = tmp_path_factory.mktemp("exported") / f"{precision.value}.onnx"
    options = ExportOptions(precision=precision)
    layers = export_onnx(kinds().train(), example(), {}, path, options)
    return Exported(precision, path, layers, onnx.load(path))
