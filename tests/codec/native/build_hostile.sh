#!/bin/sh
# Compile the programs of this folder with the kernels of the compiler's target: build_hostile.sh FOLDER [COMPILER]
# Then: FOLDER/hostile SEED CASES, or FOLDER/hostile SEED 600s for a long run. In the environment:
#   PROGRAMS="hostile kernels fuzz_ulp"  those, instead of hostile alone
#   FLAGS="-O2 -static"                  instead of AddressSanitizer and UBSan
# Under qemu-user AddressSanitizer needs ASAN_OPTIONS=detect_leaks=0.
set -eu
out=$1
cxx=${2:-${CXX:-c++}}
here=$(cd "$(dirname "$0")" && pwd)
native=$here/../../../codec/native
# -g1: lines for the backtraces, and a fifth less to compile than with -g.
sanitize="-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
flags="-std=c++17 -pthread -Wall -Wextra -Werror ${FLAGS-$sanitize} -I$native"
mkdir -p "$out"
rm -f "$out"/*.o # a compilation that fails must not leave an older one to be linked
files="body decode digest_portable encode estimate kernels_portable model patch processor sample tables values"
case $($cxx -dumpmachine) in
x86_64* | amd64*)
    flags="$flags -DWEIGHTCAST_AVX2"
    files="$files kernels_avx2 digest_avx2"
    ;;
aarch64-* | arm64-*)
    flags="$flags -DWEIGHTCAST_NEON"
    files="$files kernels_neon"
    ;;
esac

compile() {
    more=
    case $1 in
    *_avx2) more="-mavx2 -mbmi -mbmi2 -mlzcnt -mpopcnt" ;;
    # With GCC on ARM xxHash loads unaligned vectors through a plain pointer, on purpose: that processor can.
    */digest_*) more=-fno-sanitize=alignment ;;
    esac
    $cxx $flags $more -c "$1.cpp" -o "$out/$(basename "$1").o"
}

# As many at a time as there are cores. What failed has left no object, so linking fails.
cores=$(nproc 2> /dev/null || echo 2)
running=0
start() {
    if [ "$running" -ge "$cores" ]; then
        wait
        running=0
    fi
    compile "$1" &
    running=$((running + 1))
}

objects=
for program in ${PROGRAMS:-hostile}; do start "$here/$program"; done
for file in $here/cases $here/foreign $(printf "$native/%s " $files); do
    start "$file"
    objects="$objects $out/$(basename "$file").o"
done
wait
for program in ${PROGRAMS:-hostile}; do $cxx $flags $objects "$out/$program.o" -o "$out/$program"; done
