"""Stand-in libraries that let the TensorRT bindings wheel be imported without TensorRT.

The bindings' pybind11 module is linked against libnvinfer, libnvinfer_plugin and libnvonnxparser,
yet only about a dozen entry points of them are undefined in it; the rest is reached through the
vtables of objects that those return. Stand-ins whose entry points all return null are enough to
import the module, with every class, signature and enum value real. Nothing can be built with it:
every factory returns null, which is also what TensorRT does on a machine without a GPU.

Needs gcc (or $CC), nm and readelf.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

_NEEDED = re.compile(r"\(NEEDED\).*\[(libnv[^\]]*)\]")
_ENTRY_POINT = re.compile(r"[A-Za-z]\w*(?:Infer|NvOnnx|Plugin)\w*|_ZN\d+nv(?:uff|caffe)parser\w+")
"""The parsers of UFF and Caffe, which only 8.6 has, have C++ names."""

_PRELOAD = '''"""Loads the stand-in libraries; the bindings import this package first."""

import ctypes
from pathlib import Path

for library in sorted(Path(__file__).parent.glob("lib*.so.*")):
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
'''


def make_stubs(module: Path, package: Path) -> list[str]:
    """Write a `tensorrt_libs` package for the bindings' `module`; gives the libraries it holds."""
    package.mkdir(parents=True, exist_ok=True)
    libraries = _NEEDED.findall(_output("readelf", "-dW", str(module)))
    source = package / "stubs.c"
    functions = [f"void *{name}(void) {{ return 0; }}" for name in _undefined(module)]
    source.write_text("\n".join(functions) + "\n")
    compiler = os.environ.get("CC", "gcc")
    for library in libraries:
        target = str(package / library)
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", target]
        subprocess.run([*command, str(source)], check=True)
    (package / "__init__.py").write_text(_PRELOAD)
    return libraries


def _undefined(module: Path) -> list[str]:
    """C entry points of TensorRT that the module expects, without libc's and Python's own."""
    names = [line.split()[-1] for line in _output("nm", "-D", "-u", str(module)).splitlines()]
    return [name for name in names if _ENTRY_POINT.fullmatch(name) and not name.startswith("Py")]


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
