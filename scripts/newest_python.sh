#!/bin/sh
# Prints the command of a working Python 3.13 or 3.12, also one that pyenv holds; nothing where there is none.
for version in 3.13 3.12; do
  for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python3; do
    if "$candidate" -c "import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
      command -v "$candidate"
      exit 0
    fi
  done
done
