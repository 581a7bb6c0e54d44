#!/usr/bin/env bash
# Makes a release: builds the sdist and the wheel into dist/, checks their metadata, and trains from the wheel alone in
# an empty environment of each Python. It stops before the upload; --upload uploads what passed, by twine.
#   scripts/release.sh [--upload] [PYTHON ...]
# Without a PYTHON: each of python3.11 to python3.15 that starts.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

stop() { echo "release.sh: $*" >&2; exit 1; }
step() { echo "[$SECONDS s] $*"; }

upload=no
pythons=()
for word in "$@"; do
  case $word in
    --upload) upload=yes ;;
    -*) echo "release.sh: unknown option $word; usage: scripts/release.sh [--upload] [PYTHON ...]" >&2; exit 2 ;;
    *) pythons+=("$word") ;;
  esac
done
if [ ${#pythons[@]} -eq 0 ]; then
  for minor in 11 12 13 14 15; do
    for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"3.$minor".*/bin/python3; do
      if "$candidate" -c "import venv" 2>/dev/null; then
        pythons+=("$candidate")
        break
      fi
    done
  done
fi
[ ${#pythons[@]} -gt 0 ] || stop "no Python from 3.11 to 3.15 starts: name one"

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$root/jaxshard/__init__.py")
[ -n "$version" ] || stop "jaxshard/__init__.py has no __version__"
if [ "$upload" = yes ]; then
  [ -z "$(git -C "$root" status --porcelain)" ] || stop "files are not committed: commit them, or remove them"
  grep -qF "## [$version] - " "$root/CHANGELOG.md" || stop "CHANGELOG.md has no section '## [$version] - DATE'"
fi

rm -rf "$root/dist"
keep=dist # the first Python builds what is released; the others test that the sdist builds there, too
for python in "${pythons[@]}"; do
  bash "$root/scripts/smoke_wheel.sh" "$python" $keep
  keep=
done

step "check the metadata"
"${pythons[0]}" -m venv "$work/twine"
"$work/twine/bin/python" -m pip install --quiet twine
"$work/twine/bin/python" -m twine check --strict "$root"/dist/*

if [ "$upload" = no ]; then
  step "jaxshard $version passed on ${pythons[*]}; nothing was uploaded: run it again with --upload to do that"
  ls "$root"/dist
  exit 0
fi
step "upload jaxshard $version"
"$work/twine/bin/python" -m twine upload "$root"/dist/*
