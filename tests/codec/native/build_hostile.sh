#!/bin/sh
# Compile hostile.cpp and the kernels with AddressSanitizer and UBSan: build_hostile.sh FOLDER [COMPILER]
# Then: FOLDER/hostile SEED CASES, or FOLDER/hostile SEED 600s for a long run.
set -eu
out=$1
cxx=${2:-${CXX:-c++}}
here=$(cd "$(dirname "$0")" && pwd)
native=$here/../../../codec/native
flags="-std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -I$native"
mkdir -p "$out"
objects=
for file in body decode digest_portable encode estimate kernels_portable model patch tables values; do
    sources="${sources:-} $native/$file.cpp"
done
case $(uname -m) in
x86_64 | amd64)
    flags="$flags -DWEIGHTCAST_AVX2"
    for file in kernels_avx2 digest_avx2; do
        $cxx $flags -mavx2 -mbmi -mbmi2 -mlzcnt -mpopcnt -c "$native/$file.cpp" -o "$out/$file.o" &
        objects="$objects $out/$file.o"
    done
    ;;
esac
$cxx $flags "$here/hostile.cpp" -c -o "$out/hostile.o" &
for source in $sources; do
    object=$out/$(basename "$source" .cpp).o
    $cxx $flags -c "$source" -o "$object"
    objects="$objects $object"
done
wait
$cxx $flags $objects "$out/hostile.o" -o "$out/hostile"
