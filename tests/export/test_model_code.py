from __future__ import annotations

import logging
import sys
import warnings

import pytest

from twofour.export.model_code import silenced


def test_prints_warnings_and_log_lines_of_the_exporter_are_held_back(
    capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("torch.onnx._internal")
    logger.addHandler(handler)
    try:
        with silenced():
            sys.stdout.write("on stdout")
            sys.stderr.write("on stderr")
            warnings.warn("a warning", stacklevel=1)
            logger.error("a log line")
        assert capsys.readouterr() == ("", "")
        assert not recwarn.list
        logger.error("after")
        assert "after\n" in capsys.readouterr().err
    finally:
        logger.removeHandler(handler)


def test_everything_is_put_back_after_an_error() -> None:
    streams, level = (sys.stdout, sys.stderr), logging.getLogger("torch").level
    with pytest.raises(ValueError, match="inside"), silenced():
        raise ValueError("inside")
    assert (sys.stdout, sys.stderr) == streams
    assert logging.getLogger("torch").level == level
