#!/usr/bin/env bash
# Pack a complete TensorRT 8.6.0 for one GPU architecture, for an x86-64 machine without network.
#
#   pack.sh OUT_DIR [ARCH]    OUT_DIR/part-00, part-01, ...: about 194 MiB in all
#
# ARCH is 90 by default (H100, H200). 8.6.0 is the newest release whose wheel has its own libraries.
# The wheel is for CPython 3.8 to 3.10, so the pack has a CPython 3.10 with every package that
# twofour and tests/gpu import, without torch; `trt86/run SCRIPT.py` starts it.
# thin.py empties the code of other GPUs, which halves the transfers. Whether a driver accepts that
# is NOT tried yet: "invalid device image" means no, and THIN=no packs the libraries as they are.
# libnvinfer.so.8 needs neither cuBLAS nor cuDNN; only libnvinfer_plugin.so.8 does, so an empty
# stand-in for it is compiled here (no plugin layers).
# Needs python3.10 (or PYTHON310=path), pip, gcc, zstd, unzip, 5 GiB of disk, 5 minutes on two cores.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
arch=${2:-90}
pyenv=$(pyenv root 2> /dev/null || true)
python310=${PYTHON310:-$(ls -d "$pyenv"/versions/3.10.*/bin/python3.10 2> /dev/null | tail -1 || true)}
python310=${python310:-$(command -v python3.10)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/trt86
mkdir -p "$root"/{python,site,tensorrt_wheel}

"$python310" -m pip download -q --no-deps -d "$work" tensorrt==8.6.0
(cd "$root/tensorrt_wheel" && unzip -q "$work"/tensorrt-8.6.0-*.whl)
libs=$root/tensorrt_wheel/tensorrt
if [ "${THIN:-yes}" = yes ]; then
    for lib in libnvinfer.so.8 libnvinfer_builder_resource.so.8.6.0; do
        PYTHONPATH=$here/.. "$python310" -m device.thin "$libs/$lib" "$arch" "$work/thin"
        mv "$work/thin" "$libs/$lib"
    done
fi
rm "$libs/libnvinfer_plugin.so.8"
printf '#include <stdbool.h>\nbool initLibNvInferPlugins(void *logger, const char *name) { return true; }\n' |
    gcc -shared -fPIC -Wl,-soname,libnvinfer_plugin.so.8 -x c -o "$libs/libnvinfer_plugin.so.8" -

"$python310" -m pip install -q --no-compile --target "$root/site" \
    numpy onnx polygraphy colored typer rich pydantic jinja2 psutil nvidia-ml-py array-api-compat \
    threadpoolctl pytest pytest-timeout hypothesis
"$python310" -m pip install -q --no-compile --no-deps --target "$root/site" \
    onnx-ir safetensors nvidia-cuda-runtime-cu12==12.8.90
rm -rf "$root"/site/onnx/backend "$root"/site/numpy/*/tests "$root"/site/nvidia/cuda_runtime/include
prefix=$("$python310" -c 'import sys; print(sys.base_prefix)')
tar -C "$prefix" --exclude='*/test' --exclude='*/__pycache__' --exclude='*.a' --exclude='*/idlelib' \
    --exclude='*/site-packages' --exclude='*/ensurepip' --exclude='*/lib2to3' --exclude='*/tkinter' \
    -cf - bin lib | tar -C "$root/python" -xf -
cat > "$root/run" <<'RUN'
#!/usr/bin/env bash
# run SCRIPT.py ...: CPython 3.10 with TensorRT 8.6.0 importable
here=$(cd "$(dirname "$0")" && pwd)
export LD_LIBRARY_PATH=$here/tensorrt_wheel/tensorrt:$here/python/lib:$here/site/nvidia/cuda_runtime/lib:${LD_LIBRARY_PATH:-}
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$here/tensorrt_wheel:$here/site PYTHONHOME=$here/python
exec "$here/python/bin/python3.10" "$@"
RUN
chmod +x "$root/run"

rm -f "$out"/part-*
tar -C "$work" -cf - trt86 | zstd -q -T2 -12 --long=27 | split -b 50M -d - "$out/part-"
ls -l "$out"
