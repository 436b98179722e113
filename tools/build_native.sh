#!/bin/sh
# Builds the native module of ds-kernels into this checkout's src/, with ccache when there is one.
#   tools/build_native.sh                          CPU kernels
#   tools/build_native.sh -DDS_KERNELS_CUDA=ON     and the CUDA ones (any CMake options)
set -e
root=$(cd "$(dirname "$0")/.." && pwd)
build=${DS_KERNELS_BUILD_DIR:-$root/build/ds-kernels}
if [ -z "$CMAKE_CXX_COMPILER_LAUNCHER" ] && command -v ccache > /dev/null; then
    export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
fi
cmake -S "$root/packages/ds-kernels" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$(command -v python)" -Dpybind11_DIR="$(python -m pybind11 --cmakedir)" \
    -DDS_KERNELS_CUDA=OFF "$@" > "$build.log" 2>&1 || { cat "$build.log"; exit 1; }
cmake --build "$build"
cmake --install "$build" --prefix "$root/packages/ds-kernels/src" > /dev/null
