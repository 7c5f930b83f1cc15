#!/usr/bin/env bash
# Install libkvstream into a prefix and run both embedding examples against it, as an embedder would.
#
# usage: tools/embed.sh BUILD_DIR PREFIX
# needs: meson and ninja in PATH, cc, pkg-config, python3
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
build=$1
prefix=$2

if [ ! -f "$build/build.ninja" ]; then
    meson setup "$build" "$root" --prefix="$prefix" --libdir=lib --buildtype=release -Dembed=true -Dpython=false
fi
meson install -C "$build" --quiet
export PKG_CONFIG_PATH="$prefix/lib/pkgconfig"
export LD_LIBRARY_PATH="$prefix/lib"
# shellcheck disable=SC2046  # several flags, on purpose
cc "$root/examples/embed.c" $(pkg-config --cflags --libs kvstream) -o "$build/embed"
"$build/embed"
python3 "$root/examples/ctypes_embed.py" "$prefix/lib/libkvstream.so.0"
