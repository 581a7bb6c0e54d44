#!/usr/bin/env bash
# Builds the package, installs the wheel alone in an empty environment, and trains a preset from it in an empty folder.
#   scripts/smoke_wheel.sh [PYTHON [FOLDER]]
# FOLDER keeps the sdist and the wheel; without it nothing stays.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$(command -v "${1:-python3}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

step() { echo "[$SECONDS s] $*"; }
unset PYTHONPATH

step "build the sdist, and the wheel from it, with $("$python" --version)"
"$python" -m venv "$work/build"
"$work/build/bin/python" -m pip install --quiet build
"$work/build/bin/python" -m build --outdir "$work/dist" "$root" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
wheel=$(echo "$work"/dist/*.whl)

step "install ${wheel##*/} alone"
"$python" -m venv "$work/empty"
"$work/empty/bin/python" -m pip install --quiet "$wheel"
cd "$work"
version=$("$work/empty/bin/python" -W error -c "import jaxshard; print(jaxshard.__version__)")
told=$("$work/empty/bin/jaxshard" --version)
[ "$told" = "jaxshard $version" ] || { echo "jaxshard --version tells '$told', the package $version"; exit 1; }
case ${wheel##*/} in jaxshard-"$version"-*) ;; *) echo "the wheel is not version $version"; exit 1 ;; esac
place=$("$work/empty/bin/python" -c "import jaxshard; print(jaxshard.__file__)")
case $place in "$work"/*) ;; *) echo "imported from $place"; exit 1 ;; esac

step "import jaxshard and jaxshard --version: $told; install [train]"
"$work/empty/bin/python" -m pip install --quiet "${wheel}[train]"

step "train 20 steps of the preset zero3"
mkdir "$work/here"
cd "$work/here"
"$work/empty/bin/jaxshard" train zero3 --train.steps 20 --optimizer.warmup-steps 5 --out "$work/run" >"$work/train.log" 2>&1 ||
  { cat "$work/train.log"; exit 1; }
tail -n 3 "$work/train.log"
[ -d "$work/run/model/20" ] || { echo "no checkpoint of step 20"; exit 1; }
if grep -i libtpu "$work/train.log"; then exit 1; fi
if [ -n "${2:-}" ]; then
  mkdir -p "$root/$2"
  cp "$work"/dist/* "$root/$2/"
fi
step "done"
