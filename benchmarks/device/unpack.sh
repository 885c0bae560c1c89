#!/usr/bin/env bash
# unpack.sh FOLDER DEST: unpack FOLDER/part-* as DEST/trt86, and import TensorRT from there.
# Where there is no zstd, FOLDER/zstandard-*.whl does its work; it must fit the machine's python3.
set -euo pipefail
mkdir -p "$2"
expand() { zstd -q -d --long=27; }
if ! command -v zstd > /dev/null; then
    python3 -m zipfile -e "$1"/zstandard-*.whl "$2/zstandard"
    program='import sys, zstandard
zstandard.ZstdDecompressor(max_window_size=2**27).copy_stream(sys.stdin.buffer, sys.stdout.buffer)'
    expand() { PYTHONPATH="$2/zstandard" python3 -c "$program"; }
fi
cat "$1"/part-* | expand "$@" | tar -C "$2" -xf -
"$2/trt86/run" -c 'import tensorrt; print("TensorRT", tensorrt.__version__)'
