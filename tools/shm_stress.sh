#!/bin/sh
# Builds the shared-memory collectives with a sanitiser and runs them on ranks that are threads.
#   tools/shm_stress.sh thread                     2, 3 and 4 ranks, 150 rounds each
#   tools/shm_stress.sh address,undefined 3 1000   3 ranks, 1000 rounds
set -e
sanitizer=${1:-thread}
csrc=$(cd "$(dirname "$0")/.." && pwd)/packages/ds-kernels/csrc
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
compile() { ${CXX:-c++} -std=c++17 -g -O1 -Wall -Wextra -Wno-unknown-pragmas "-fsanitize=$sanitizer" -I"$csrc" "$@"; }
# One instruction set is enough here: the loops are the same.
for level in baseline avx2 avx512; do
    compile "-DDS_ISA=$level" -c "$csrc/cpu/shm.cpp" -o "$out/$level.o"
done
compile "$csrc/shm/stress.cpp" "$csrc/shm/group.cpp" "$csrc/shm/segment.cpp" "$csrc/cpu/isa.cpp" \
    "$out"/*.o -pthread -o "$out/stress"
for ranks in ${2:-2 3 4}; do "$out/stress" "$ranks" "${3:-150}"; done
